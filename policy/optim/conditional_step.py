"""Steps that are applied or skipped on a flag, as each platform compiles them best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from policy.core.arrays import working_dtype
from policy.optim.finiteness import agreed, stays_finite
from policy.optim.moments import StoredInner
from policy.optim.state import MixedPrecisionState, incremented
from policy.optim.storage_modes import (
    Encoded,
    MasterWeights,
    StorageMode,
    Stored,
    storage_mode,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ParamUpdate:
    """The update of one param, whose float32 value is stored in a mode.

    Attributes:
      mode: the storage mode of the param's dtype.
      dtype: the param's dtype.
      as_update: True where the result is a difference for `optax.apply_updates` to add, instead of
        the param itself.
    """

    mode: StorageMode
    dtype: np.dtype
    as_update: bool

    @classmethod
    def of(cls, param: jax.Array, master_weights: MasterWeights, as_update: bool) -> ParamUpdate:
        """Returns the update of `param` for the mode that `master_weights` stores its dtype in."""
        return cls(storage_mode(param.dtype, master_weights), np.dtype(param.dtype), as_update)

    @property
    def is_wide(self) -> bool:
        """True where the param is its own float32 value; its update is the inner transform's."""
        return self.dtype == working_dtype(self.dtype)

    @property
    def is_packed(self) -> bool:
        """True where a branch returns the param packed with its stored array."""
        return self.mode.is_packed and not self.as_update

    def applied(
        self, param: jax.Array, value: jax.Array, update: jax.Array, key: jax.Array | None
    ) -> Encoded:
        """Returns the result of the branch that steps to a float32 `value`."""
        if self.as_update and self.is_wide:
            return update, optax.MaskedNode()
        key = key if self.mode.needs_key else None
        return self._in_branch(self.mode.encode(value, self.dtype, key), param)

    def skipped(self, param: jax.Array, stored: Stored) -> Encoded:
        """Returns the result of the branch that changes nothing, of the same types."""
        if self.as_update and self.is_wide:
            return jnp.zeros_like(param), optax.MaskedNode()
        return self._in_branch(self.mode.encode_same(param, stored), param)

    def _in_branch(self, encoded: Encoded, param: jax.Array) -> Encoded:
        # a packed pair leaves the branch as one array, and is taken apart outside
        if self.mode.is_packed or not self.as_update:
            return encoded
        new, stored = encoded
        return _difference(new, param), stored

    def unpacked(self, encoded: Encoded) -> Encoded:
        """Takes a branch's result apart where it is a packed param."""
        return self.mode.decode(encoded, self.dtype) if self.is_packed else encoded

    def result(self, unpacked: Encoded, param: jax.Array) -> tuple[jax.Array, Stored]:
        """Returns the param, or its update, and its stored array, from an `unpacked` result."""
        if not self.mode.is_packed or self.is_packed:
            new, stored = unpacked
            return new, stored
        new, stored = self.mode.decode(unpacked, self.dtype)
        return _difference(new, param), stored


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the float32 difference of two half-precision arrays; infinities stay infinite."""
    wide = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.where(new == old, jnp.zeros_like(wide), wide)


class Operands(NamedTuple):
    """The arguments of both branches.

    Attributes:
      params: a tree of params.
      gradients: their gradients, as they were handed over.
      inner: the inner transform's state, with the scales of its moments.
      masters: a tree like the params, of stored arrays.
    """

    params: optax.Params
    gradients: optax.Updates
    inner: StoredInner
    masters: optax.Params


Results: TypeAlias = tuple[list[Encoded], StoredInner]
"""The results of a branch: each param's, in flattening order, and the inner transform's state."""

Branch: TypeAlias = Callable[[Operands], Results]


@dataclasses.dataclass(frozen=True)
class ConditionalStep:
    """A step that is applied, and one that changes nothing.

    Attributes:
      param_updates: one for each param.
      as_updates: True where results are updates to add to the params.
      apply_step: the branch that steps.
      skip_step: the branch that changes nothing, with results of the same types.
      operands: the arguments of both.
    """

    param_updates: list[ParamUpdate]
    as_updates: bool
    apply_step: Branch
    skip_step: Branch
    operands: Operands

    @property
    def is_packed(self) -> bool:
        """True where XLA computes a pair of results in one pass only inside of a branch."""
        return any(each.mode.is_packed for each in self.param_updates)

    def applied(self) -> Results:
        """Applies the step."""
        return self.apply_step(self.operands)

    def applied_where(self, flag: jax.Array) -> Results:
        """Applies the step where `flag`, () bool and computed from the gradients, is True."""
        return self._selected_on_tpus(flag) if self.as_updates else self._unpacked(flag)

    def applied_mostly(self, flag: jax.Array) -> Results:
        """Applies the step where `flag`, () bool and a scalar of the state, is True.

        Such a flag is known before the step, so a select costs no pass of its own.
        """
        if any(each.mode.stores for each in self.param_updates):
            return self._unpacked(flag)
        return selected(flag, self.applied(), self.skip_step(self.operands))

    def _selected_on_tpus(self, flag: jax.Array) -> Results:
        """Computes `lax.cond`, or on TPUs a select of the results of both branches.

        A TPU's compiler fuses the selects, and the addition of the updates that follows, into the
        step itself. It would write the results of a branch, and read them again for the addition.
        XLA:CPU would compute the step once for each result of a select.
        """
        apply_step, skip_step = jax.jit(self.apply_step), self.skip_step  # traced once for both
        return lax.platform_dependent(
            flag,
            self.operands,
            tpu=lambda flag, of: selected(flag, apply_step(of), skip_step(of)),
            default=lambda flag, of: lax.cond(flag, apply_step, skip_step, of),
        )

    def _unpacked(self, flag: jax.Array) -> Results:
        """Computes `lax.cond`, and takes packed pairs apart after it; on TPUs in the branches.

        A TPU's compiler takes them apart in the kernel that makes them. XLA:CPU would compute each
        half in a pass of its own over the moments.
        """
        skip_step, updates = self.skip_step, self.param_updates
        if not any(each.is_packed for each in updates):
            return lax.cond(flag, self.apply_step, skip_step, self.operands)
        apply_step = jax.jit(self.apply_step, inline=True)  # traced once for both

        def unpacked(results: Results) -> Results:
            encoded, inner = results
            return [d.unpacked(e) for d, e in zip(updates, encoded, strict=True)], inner

        def apply_unpacked(operands: Operands) -> Results:
            encoded, inner = apply_step(operands)
            return unpacked(([lax.optimization_barrier(each) for each in encoded], inner))

        def skip_unpacked(operands: Operands) -> Results:
            leaves, tree = jax.tree.flatten(operands.params)
            stored = tree.flatten_up_to(operands.masters)
            same = zip(updates, leaves, stored, skip_step(operands)[0], strict=True)
            pairs: list[Encoded] = [(p, kept) if d.is_packed else e for d, p, kept, e in same]
            return pairs, operands.inner

        return lax.platform_dependent(
            flag,
            self.operands,
            tpu=lambda flag, of: lax.cond(flag, apply_unpacked, skip_unpacked, of),
            default=lambda flag, of: unpacked(lax.cond(flag, apply_step, skip_step, of)),
        )


def selected(flag: jax.Array, new: T, old: T) -> T:
    """Returns the leaves of `new` where `flag`, () bool, is True, else those of `old`."""
    return jax.tree.map(lambda x, y: lax.select(flag, x, y), new, old)


def unless_not_finite(
    before: tuple[optax.Params, MixedPrecisionState],
    after: tuple[optax.Params, MixedPrecisionState],
    gradients: optax.Updates,
    axis_name: Sequence[Hashable],
    as_updates: bool,
) -> tuple[optax.Params, MixedPrecisionState]:
    """Returns the results of a step, or those of a skipped one where a finite leaf becomes
    infinite or NaN.
    """
    (params, state), (new, new_state) = before, after
    moved = jax.tree.map(lambda p, u: p.astype(u.dtype) + u, params, new) if as_updates else new
    parts = [(params, state.masters, state.inner, state.moment_scales)]
    parts += [(moved, new_state.masters, new_state.inner, new_state.moment_scales)]
    sound = agreed(stays_finite(*parts), gradients, axis_name)
    skipped = state._replace(
        loss_scale=state.loss_scale.adjust(jnp.array(False)),
        finite=jnp.zeros_like(new_state.finite),
        skipped=incremented(state.skipped, jnp.array(True)),
    )
    same = jax.tree.map(jnp.zeros_like, new) if as_updates else params
    return selected(sound, after, (same, skipped))
