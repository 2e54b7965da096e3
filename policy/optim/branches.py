"""The branches of a step: applied or skipped, as each platform compiles them best."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from policy.optim.delivery import Delivery


def step_by_platform(finite: jax.Array, apply_step: Any, skip_step: Any, operands: Any) -> Any:
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


def unpacked_by_platform(
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
