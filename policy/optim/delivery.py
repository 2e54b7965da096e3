"""A step's results for one param: as the branches return them, and then as a param and its master."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.optim.storage import PACKED, Kind, MasterWeights, hold, hold_same, kind_of, release
from policy.trees import working_dtype


@dataclasses.dataclass(frozen=True)
class Delivery:
    """One param's way out of a step.

    Attributes:
      kind: how its float32 value is kept.
      dtype: the param's.
      as_update: whether the result is what `optax.apply_updates` should add, instead of the param itself.
    """

    kind: Kind
    dtype: np.dtype
    as_update: bool

    @classmethod
    def of(cls, param: jax.Array, master_weights: MasterWeights, as_update: bool) -> Delivery:
        return cls(kind_of(param.dtype, master_weights), np.dtype(param.dtype), as_update)

    @property
    def is_wide(self) -> bool:
        """True where the param is its own float32 value: then the inner transform's update is returned as it is."""
        return self.dtype == working_dtype(self.dtype)

    def applied(self, param: jax.Array, wide: jax.Array, update: jax.Array, key: Any) -> Any:
        """Returns the result of the branch that steps, for a new value."""
        if self.as_update and self.is_wide:
            return update
        held = hold(wide, self.dtype, self.kind, key)
        return held if self.kind in PACKED or not self.as_update else self._with_difference(held, param)

    def skipped(self, param: jax.Array, kept: Any) -> Any:
        """Returns the result of the branch that changes nothing, of the same types."""
        if self.as_update and self.is_wide:
            return jnp.zeros_like(param)
        held = hold_same(param, kept, self.kind)
        return held if self.kind in PACKED or not self.as_update else self._with_difference(held, param)

    @property
    def is_packed(self) -> bool:
        """True where a branch's result is to be taken apart into a param and its stored remainder."""
        return self.kind in PACKED and not self.as_update

    def unpacked(self, held: Any) -> Any:
        """Takes a branch's result apart where it is packed."""
        return release(held, self.dtype, self.kind) if self.is_packed else held

    def result(self, held: Any, param: jax.Array) -> tuple[jax.Array, Any]:
        """The param or the update, and what is kept beside the param; of what is `unpacked`."""
        if self.is_packed:
            return held
        if self.kind not in PACKED:
            return release(held, self.dtype, self.kind)
        new, kept = release(held, self.dtype, self.kind)
        return _difference(new, param), kept

    def _with_difference(self, held: Any, param: jax.Array) -> Any:
        return (_difference(held[0], param), held[1]) if self.kind == "full" else _difference(held, param)


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """float32: what leads from one narrow value to another when it is added in float32."""
    wide = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.where(new == old, jnp.zeros_like(wide), wide)  # infinity stays infinity
