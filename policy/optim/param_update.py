"""One param's result of a step: as a branch returns it, and as a param and its stored array."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.core.trees import working_dtype
from policy.optim.storage_modes import (
    Encoded,
    MasterWeights,
    StorageMode,
    Stored,
    storage_mode,
)


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
