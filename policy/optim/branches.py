"""The branches of a step: applied or skipped, as each platform compiles them best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from policy.optim.delivery import Delivery
from policy.optim.storage import PACKED


@dataclasses.dataclass(frozen=True)
class Branches:
    """A step that is applied, and one that changes nothing.

    Attributes:
      deliveries: one for each param.
      as_updates: whether the results are what to add to params.
      apply_step, skip_step: functions of `operands`. They return each param's result, to be taken by its delivery, and
        the inner state.
      operands: params, gradients, the inner state, masters.
    """

    deliveries: list[Delivery]
    as_updates: bool
    apply_step: Callable[[Any], Any]
    skip_step: Callable[[Any], Any]
    operands: tuple[Any, Any, Any, Any]

    @property
    def is_packed(self) -> bool:
        """True where XLA computes a pair of results in one pass only inside of a branch."""
        return any(delivery.kind in PACKED for delivery in self.deliveries)

    def applied(self) -> Any:
        """Applies the step."""
        return self.apply_step(self.operands)

    def applied_where(self, flag: jax.Array) -> Any:
        """Applies the step where a () bool is true, which is computed from the gradients."""
        if self.as_updates:
            return _step_by_platform(flag, self.apply_step, self.skip_step, self.operands)
        return self._unpacked(flag)

    def applied_mostly(self, flag: jax.Array) -> Any:
        """Applies the step where a () bool is true, which is a scalar of the state: then a select costs no pass."""
        if self.is_packed or any(delivery.kind == "full" for delivery in self.deliveries):
            return self._unpacked(flag)
        return selected(flag, self.applied(), self.skip_step(self.operands))

    def _unpacked(self, flag: jax.Array) -> Any:
        return _unpacked_by_platform(self.deliveries, flag, self.apply_step, self.skip_step, self.operands)


def _step_by_platform(finite: jax.Array, apply_step: Any, skip_step: Any, operands: Any) -> Any:
    """`lax.cond`, or on TPUs a select of the two results.

    A TPU's compiler fuses the selects, and the addition of the updates that follows, into the step itself. The results
    of a branch it would write, and read again for the addition. XLA:CPU would compute the step once for each result.
    """
    apply_step = jax.jit(apply_step)  # traced once for both

    def select(finite: jax.Array, operands: Any) -> Any:
        return jax.tree.map(lambda new, old: lax.select(finite, new, old), apply_step(operands), skip_step(operands))

    return lax.platform_dependent(
        finite,
        operands,
        tpu=select,
        default=lambda finite, operands: lax.cond(finite, apply_step, skip_step, operands),
    )


def _unpacked_by_platform(
    deliveries: list[Delivery], condition: jax.Array, apply_step: Any, skip_step: Any, operands: Any
) -> Any:
    """`lax.cond`, after which packed pairs are taken apart; on TPUs in the branches.

    A TPU's compiler takes them apart in the kernel that makes them. XLA:CPU would compute each half in a pass of its
    own over the moments.
    """
    if not any(delivery.is_packed for delivery in deliveries):
        return lax.cond(condition, apply_step, skip_step, operands)
    apply_step = jax.jit(apply_step, inline=True)  # traced once for both

    def unpacked(results: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        held, inner = results
        return [delivery.unpacked(h) for delivery, h in zip(deliveries, held, strict=True)], inner

    def inside(condition: jax.Array, operands: Any) -> Any:
        def apply_unpacked(operands: Any) -> Any:
            held, inner = apply_step(operands)
            return unpacked(([lax.optimization_barrier(h) for h in held], inner))

        def skip_unpacked(operands: Any) -> Any:
            params, _, inner, masters = operands
            leaves, tree = jax.tree.flatten(params)
            held = skip_step(operands)[0]
            same = zip(deliveries, leaves, tree.flatten_up_to(masters), held, strict=True)
            return [(param, kept) if delivery.is_packed else h for delivery, param, kept, h in same], inner

        return lax.cond(condition, apply_unpacked, skip_unpacked, operands)

    def outside(condition: jax.Array, operands: Any) -> Any:
        return unpacked(lax.cond(condition, apply_step, skip_step, operands))

    return lax.platform_dependent(condition, operands, tpu=inside, default=outside)


def selected(flag: jax.Array, new: Any, old: Any) -> Any:
    """Returns the leaves of `new` where a () bool is true, else those of `old`."""
    return jax.tree.map(lambda x, y: lax.select(flag, x, y), new, old)
