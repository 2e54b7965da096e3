"""Storage modes: the array stored beside a half-precision param, and the float32 value of both.

| mode | stored beside the param | float32 value |
|---|---|---|
| full | the float32 master | the master |
| remainder | the low 16 bits of the master, uint16 | the param's bits above the low ones |
| kahan | the rounding error, in the param's dtype | param + rounding error |
| stochastic, none | nothing | the param |

A mode is one record in `STORAGE_MODES`, with its name in `MasterWeights`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import working_dtype
from policy.optim.rounding import (
    halves,
    join_master,
    pack,
    packed,
    round_stochastically,
    round_to,
    split,
)

MasterWeights: TypeAlias = Literal["auto", "full", "remainder", "kahan", "stochastic", "none"]

Stored: TypeAlias = jax.Array | optax.MaskedNode
"""An array of the param's shape, or an empty node where a mode stores nothing."""

Encoded: TypeAlias = jax.Array | tuple[jax.Array, Stored]
"""A param and its stored array: a pair, or one uint32 array with the bits of both."""


def _as_pair(param: jax.Array, stored: Stored) -> Encoded:
    return param, stored


def _same_pair(encoded: tuple[jax.Array, Stored], dtype: np.dtype) -> tuple[jax.Array, Stored]:
    return encoded


@dataclasses.dataclass(frozen=True)
class StorageMode:
    """The storage of float32 values in half-precision params and an array beside each.

    Attributes:
      name: the mode's name in `MasterWeights`.
      code: the mode's number in `MixedPrecisionState.mode`, see `storage_code`; 0 for modes that
        store nothing. Checkpoints hold it, so it never changes. After 3 comes 16, as 4 to 15 stand
        for float16.
      init: maps a param that equals its float32 value to its stored array. The array is computed
        from the param, so that it is sharded alike.
      join: maps a param and its stored array to the value that the inner transform sees: float32,
        or wider. Finite where the param is finite, even if the stored array is stale.
      encode: maps a value, the param's dtype and a PRNG key, if the mode needs one, to the rounded
        param and its stored array, as a branch returns them. Without a key, rounds to nearest.
      encode_same: maps a param and its stored array to the same form, unchanged.
      decode: maps the encoded form and the param's dtype to the param and its stored array.
      stored_dtype: maps a param's dtype to the dtype of its stored array; None for modes that
        store nothing.
      param_dtypes: names of the half-precision dtypes that the mode takes.
      is_packed: True where the encoded form is one uint32 array. XLA would compute two arrays of
        16 bits in one pass over the moments each.
      is_master: True where the stored array is the float32 value itself, which can disagree with
        its param.
      needs_key: True where rounding draws from a PRNG key.
    """

    name: MasterWeights
    code: int
    init: Callable[[jax.Array], Stored]
    join: Callable[[jax.Array, Any], jax.Array]
    encode: Callable[[jax.Array, np.dtype, jax.Array | None], Encoded]
    encode_same: Callable[[jax.Array, Any], Encoded] = _as_pair
    decode: Callable[[Any, np.dtype], tuple[jax.Array, Stored]] = _same_pair
    stored_dtype: Callable[[np.dtype], np.dtype] | None = None
    param_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    is_packed: bool = False
    is_master: bool = False
    needs_key: bool = False

    @property
    def stores(self) -> bool:
        """True where an array is stored beside each param."""
        return self.stored_dtype is not None

    def split(self, value: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, Stored]:
        """Splits a float32 value, rounded to nearest, into a param of `dtype` and its array."""
        return self.decode(self.encode(value, np.dtype(dtype), None), np.dtype(dtype))


def _nothing(param: jax.Array) -> Stored:
    return optax.MaskedNode()


def _param_alone(param: jax.Array, stored: Stored) -> jax.Array:
    return param.astype(working_dtype(param.dtype))


def _encode_alone(value: jax.Array, dtype: np.dtype, key: jax.Array | None) -> Encoded:
    rounded = round_to(value, dtype) if key is None else round_stochastically(value, dtype, key)
    return rounded, optax.MaskedNode()


NONE = StorageMode("none", 0, init=_nothing, join=_param_alone, encode=_encode_alone)
STOCHASTIC = dataclasses.replace(NONE, name="stochastic", needs_key=True)


FULL = StorageMode(
    "full",
    1,
    init=lambda param: param.astype(jnp.float32),
    join=lambda param, master: master,
    encode=lambda value, dtype, key: (round_to(value, dtype), value),
    stored_dtype=lambda dtype: np.dtype("float32"),
    is_master=True,
)


REMAINDER = StorageMode(
    "remainder",
    2,
    init=lambda param: jnp.zeros_like(param, jnp.uint16),
    join=join_master,
    encode=lambda value, dtype, key: pack(value),
    encode_same=packed,
    decode=lambda encoded, dtype: split(encoded),
    stored_dtype=lambda dtype: np.dtype("uint16"),
    param_dtypes=("bfloat16",),
    is_packed=True,
)


def _join_kahan(param: jax.Array, stored: jax.Array) -> jax.Array:
    wide = param.astype(working_dtype(param.dtype))
    error = stored.astype(wide.dtype)
    # A stale error no longer rounds to the param. It is taken a little short, as it may have been
    # rounded up to a tie.
    fresh = round_to(wide + error * np.float32(1 - 2.0**-8), param.dtype) == param
    return jnp.where(fresh, wide + error, wide)


def _encode_kahan(value: jax.Array, dtype: np.dtype, key: jax.Array | None) -> jax.Array:
    param = round_to(value, dtype)
    error = value - param.astype(value.dtype)
    error = jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))
    return _pair(param, error.astype(dtype))


def _decode_kahan(encoded: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    param, error = halves(encoded, dtype)
    return param, lax.bitcast_convert_type(error, dtype)


def _pair(high: jax.Array, low: jax.Array) -> jax.Array:
    """Packs two arrays of 16 bits into one of uint32."""
    bits = [lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (high, low)]
    return (bits[0] << jnp.uint32(16)) | bits[1]


KAHAN = StorageMode(
    "kahan",
    3,
    init=jnp.zeros_like,
    join=_join_kahan,
    encode=_encode_kahan,
    encode_same=_pair,
    decode=_decode_kahan,
    stored_dtype=lambda dtype: dtype,
    is_packed=True,
)

STORAGE_MODES: dict[str, StorageMode] = {
    mode.name: mode for mode in (FULL, REMAINDER, KAHAN, STOCHASTIC, NONE)
}


def mode_names() -> tuple[str, ...]:
    """Returns the values that `master_weights` takes: "auto" and the names of all modes."""
    return ("auto", *STORAGE_MODES)


def storage_mode(param_dtype: DTypeLike, master_weights: MasterWeights) -> StorageMode:
    """Returns the mode for params of a dtype: float32 and wider are their own masters, always."""
    dtype = jnp.dtype(param_dtype)
    if dtype.itemsize >= 4:
        return NONE
    if master_weights == "auto":
        return REMAINDER if dtype == jnp.bfloat16 else FULL
    return STORAGE_MODES[master_weights]


HALF_DTYPES = ("bfloat16", "float16")


def storage_code(dtypes: Iterable[DTypeLike], master_weights: MasterWeights) -> int:
    """Encodes the arrays that are stored beside params of these dtypes.

    The code of the mode for bfloat16, and 4 times that for float16; 0 without params of that dtype.
    Master weights of equal codes store the same: "auto" and "remainder" for bfloat16, "stochastic"
    and "none".
    """
    names = {np.dtype(dtype).name for dtype in dtypes}
    bfloat16, float16 = (
        storage_mode(name, master_weights).code if name in names else 0 for name in HALF_DTYPES
    )
    return bfloat16 + 4 * float16


def storage_text(code: int) -> str:
    """Spells a storage code out: ``remainder for bfloat16, full for float16``, ``nothing``."""
    for modes in itertools.product(STORAGE_MODES.values(), repeat=2):
        if modes[0].code + 4 * modes[1].code == code:
            pairs = zip(modes, HALF_DTYPES, strict=True)
            return ", ".join(f"{m.name} for {name}" for m, name in pairs if m.stores) or "nothing"
    return f"an unknown storage ({code})"
