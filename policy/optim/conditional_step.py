"""Steps that are applied or skipped on a flag, as each platform compiles them best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from policy.core.arrays import working_dtype
from policy.optim.moments import StoredInner
from policy.optim.storage_modes import Encoded, StorageMode, Stored

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

    def leaves(self) -> tuple[list[jax.Array], list[Stored]]:
        """Returns the params and their stored arrays, in flattening order."""
        leaves, tree = jax.tree.flatten(self.params)
        return leaves, tree.flatten_up_to(self.masters)


Results: TypeAlias = tuple[list[Encoded], StoredInner]
"""The results of a branch: each param's, in flattening order, and the inner transform's state."""

Branch: TypeAlias = Callable[[Operands], Results]


def cond_or_select(
    flag: jax.Array, apply_step: Branch, skip_step: Branch, operands: Operands
) -> Results:
    """Computes `lax.cond`, or on TPUs a select of the results of both branches.

    A TPU's compiler fuses the selects, and the addition of the updates that follows, into the step
    itself. It would write the results of a branch, and read them again for the addition. XLA:CPU
    would compute the step once for each result of a select.
    """
    apply_step = jax.jit(apply_step)  # traced once for both
    return lax.platform_dependent(
        flag,
        operands,
        tpu=lambda flag, of: selected(flag, apply_step(of), skip_step(of)),
        default=lambda flag, of: lax.cond(flag, apply_step, skip_step, of),
    )


def unpacked_cond(
    flag: jax.Array,
    updates: list[ParamUpdate],
    apply_step: Branch,
    skip_step: Branch,
    operands: Operands,
) -> Results:
    """Computes `lax.cond`, and takes packed pairs apart after it; on TPUs in the branches.

    A TPU's compiler takes them apart in the kernel that makes them. XLA:CPU would compute each half
    in a pass of its own over the moments.
    """
    if not any(each.is_packed for each in updates):
        return lax.cond(flag, apply_step, skip_step, operands)
    apply_step = jax.jit(apply_step, inline=True)  # traced once for both

    def unpacked(results: Results) -> Results:
        encoded, inner = results
        return [d.unpacked(e) for d, e in zip(updates, encoded, strict=True)], inner

    def apply_unpacked(operands: Operands) -> Results:
        encoded, inner = apply_step(operands)
        return unpacked(([lax.optimization_barrier(each) for each in encoded], inner))

    def skip_unpacked(operands: Operands) -> Results:
        same = zip(updates, *operands.leaves(), skip_step(operands)[0], strict=True)
        pairs: list[Encoded] = [(p, kept) if d.is_packed else e for d, p, kept, e in same]
        return pairs, operands.inner

    return lax.platform_dependent(
        flag,
        operands,
        tpu=lambda flag, of: lax.cond(flag, apply_unpacked, skip_unpacked, of),
        default=lambda flag, of: unpacked(lax.cond(flag, apply_step, skip_step, of)),
    )


def selected(flag: jax.Array, new: T, old: T) -> T:
    """Returns the leaves of `new` where `flag`, () bool, is True, else those of `old`."""
    return jax.tree.map(lambda x, y: lax.select(flag, x, y), new, old)
