"""Float32 values in half-precision params: rounding, and the array stored beside each param.

| mode | stored beside the param | float32 value |
|---|---|---|
| full | the float32 master | the master |
| remainder | the low 16 bits of the master, uint16 | the param's bits above the low ones |
| stochastic, none | nothing | the param |

A mode is one record in `STORAGE_MODES`, with its name in `MasterWeights`. Params are rounded to
nearest, so that it can be undone, or stochastically.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import axes_of_leaves, working_dtype

MasterWeights: TypeAlias = Literal["auto", "full", "remainder", "stochastic", "none"]

Stored: TypeAlias = jax.Array | optax.MaskedNode
"""An array of the param's shape, or an empty node where a mode stores nothing."""

Encoded: TypeAlias = jax.Array | tuple[jax.Array, Stored]
"""A param and its stored array: a pair, or one uint32 array with the bits of both."""

_HALF = 0x8000  # half of a bfloat16 ulp, in the bits of a float32
_NAN = 0x7FC00000


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to a param's dtype, to nearest.

    Ties of float32 to bfloat16 are rounded away from zero: `bits + 0x8000`, cut, which can be
    undone from the low 16 bits. All others are rounded to even. Overflows to infinity exactly where
    rounding to nearest does (from 2^128 - 2^119 on). NaN stays NaN.
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    return _halves(pack(x))[0]


def pack(x: jax.Array) -> jax.Array:
    """Packs float32 into uint32: `round_to(x, bfloat16)` in the high half, the rest in the low one.

    The low half is 0 where both are equal. `halves` takes the pair apart, and `join_master` makes
    the float32 of the halves.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + jnp.uint32(_HALF)) ^ jnp.uint32(_HALF)
    return jnp.where(jnp.isnan(x), jnp.uint32(_NAN), rounded)  # the sum of a NaN may overflow


def halves(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the high 16 bits of a uint32 array as bfloat16, and the low ones as uint16."""
    return lax.platform_dependent(pair, tpu=_halves_in_turn, default=_halves)


def _halves(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = (pair >> jnp.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(high, jnp.bfloat16), pair.astype(jnp.uint16)


def _halves_in_turn(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the low half from the high one.

    A TPU's compiler writes two results that depend on each other in one pass, and two that don't in
    one pass each.
    """
    high = lax.bitcast_convert_type(pair & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return high, (pair ^ bits).astype(jnp.uint16)


def written_with(moment: jax.Array, pair: jax.Array) -> jax.Array:
    """Returns `moment`, which on a TPU depends on both halves of a param's pair.

    A TPU's compiler then writes the moments and the halves in one pass. Without it, it computes the
    step of AdamW in two, which read the moments twice.

    Args:
      moment: float32, of the param's shape.
      pair: uint32, the result of `pack`.
    """
    return lax.platform_dependent(moment, pair, tpu=_tied, default=lambda moment, pair: moment)


@jax.custom_jvp
def _tied(moment: jax.Array, pair: jax.Array) -> jax.Array:
    # 0; the high half is not, where the conversion to bfloat16 changes the payload of a NaN
    zero = (_pair(*_halves_in_turn(pair)) ^ pair) & jnp.uint32(0xFFFF)
    bits = lax.bitcast_convert_type(moment, jnp.uint32)
    return lax.bitcast_convert_type(bits ^ zero, moment.dtype)


_tied.defjvps(lambda tangent, out, moment, pair: tangent, None)


def _pair(high: jax.Array, low: jax.Array) -> jax.Array:
    """Packs bfloat16 and uint16 into one array of uint32."""
    bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return bits | low.astype(jnp.uint32)


def join_master(param: jax.Array, low: jax.Array) -> jax.Array:
    """Joins a bfloat16 param and its low 16 bits into the float32 master.

    A param that was written to since is honored to within one ulp of bfloat16. Two stale low
    halves make a NaN: one below zero beside ±0, and one above beside ±infinity. There the master is
    the param.
    """
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    bits = ((high | low.astype(jnp.uint32)) ^ jnp.uint32(_HALF)) - jnp.uint32(_HALF)
    master, alone = (lax.bitcast_convert_type(x, jnp.float32) for x in (bits, high))
    return jnp.where(jnp.isnan(master), alone, master)


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds float32 `x` up or down to a half dtype by chance, so that the mean is `x`.

    Numbers of the dtype stay as they are, as do NaN and infinities. Rounds to nearest where
    rounding up would overflow.

    Args:
      x: float32, of any shape.
      dtype: bfloat16 or float16.
      key: a JAX PRNG key, typed or raw.
    """
    noise = random_bits(key, x.shape, 16)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # bits of float32's fraction that the dtype has no room for
    dropped = 16 if dtype == jnp.bfloat16 else 13
    mask = np.uint32((1 << dropped) - 1)
    up = lax.bitcast_convert_type((bits + (noise & mask)) & ~mask, jnp.float32)
    if dtype != jnp.bfloat16:  # below its smallest normal, 2^-14, float16 is a grid of 2^-24
        exact = jnp.abs(x) * np.float32(2.0**24)
        steps = jnp.floor(exact + noise.astype(jnp.float32) * np.float32(2.0**-16))
        is_subnormal = jnp.abs(x) < np.float32(2.0**-14)
        up = jnp.where(is_subnormal, jnp.copysign(steps * np.float32(2.0**-24), x), up)
    rounded = up.astype(dtype)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(rounded), rounded, round_to(x, dtype))


def random_bits(key: jax.Array, shape: tuple[int, ...], count: int) -> jax.Array:
    """Returns `count` random bits an element, as uint32: a hash of the key and the position.

    `jax.random.bits` is as random as encryption needs, and XLA:CPU moves 56 bytes an element for
    it; this fuses into the rounding. The mixer is C. Wellons's `lowbias32` (2018, "Prospecting for
    Hash Functions"), in two rounds.
    """
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = (jax.random.key_data(key) if is_typed else key).reshape(-1)
    x = jnp.full(shape, words[0])
    for dimension in range(len(shape)):
        stride = np.uint32(np.prod(shape[dimension + 1 :], dtype=np.uint64) & np.uint64(0xFFFFFFFF))
        x = x + lax.broadcasted_iota(jnp.uint32, shape, dimension) * stride
    return _mix(_mix(x) ^ words[-1]) >> jnp.uint32(32 - count)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def rounding_keys(
    key: jax.Array | None,
    leaves: Sequence[jax.Array],
    count: jax.Array,
    axis_name: Sequence[Hashable],
    first: int = 0,
) -> list[jax.Array | None]:
    """Returns a PRNG key for each leaf, step and shard of a leaf; Nones without a `key`.

    A leaf that is the same on every device is rounded the same way on each.

    Args:
      key: one JAX PRNG key, or None.
      leaves: arrays to round.
      count: () int32, the step.
      axis_name: see `axes_of_leaves`.
      first: the number of the first leaf.
    """
    if key is None:
        return [None] * len(leaves)
    key, keys = jax.random.fold_in(key, count), []
    for number, axes in enumerate(axes_of_leaves(leaves, axis_name), first):
        leaf_key = jax.random.fold_in(key, number)
        for axis in sorted(axes, key=str):
            leaf_key = jax.random.fold_in(leaf_key, lax.axis_index(axis))
        keys.append(leaf_key)
    return keys


@dataclasses.dataclass(frozen=True)
class StorageMode:
    """The storage of float32 values in half-precision params and an array beside each.

    Attributes:
      name: the mode's name in `MasterWeights`.
      code: the mode's number in `MixedPrecisionState.mode`, see `storage_code`; 0 for modes that
        store nothing. Checkpoints hold it, so it never changes. Multiples of 4 stand for float16.
      init: maps a param that equals its float32 value to its stored array. The array is computed
        from the param, so that it is sharded alike.
      join: maps a param and its stored array to the value that the inner transform sees: float32,
        or wider. Finite where the param is finite, even if the stored array is stale.
      encode: maps a value, the param's dtype and a PRNG key, if the mode needs one, to the rounded
        param and its stored array, as a branch returns them. Without a key, rounds to nearest.
      stored_dtype: the dtype of the stored array; None for modes that store nothing.
      param_dtypes: names of the half-precision dtypes that the mode takes.
      is_packed: True where the encoded form is one uint32 array. XLA would compute two arrays of
        16 bits in one pass over the moments each. A TPU's compiler writes the moments together with
        both halves, see `written_with`.
    """

    name: MasterWeights
    code: int
    init: Callable[[jax.Array], Stored]
    join: Callable[[jax.Array, Any], jax.Array]
    encode: Callable[[jax.Array, np.dtype, jax.Array | None], Encoded]
    stored_dtype: np.dtype | None = None
    param_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    is_packed: bool = False

    @property
    def stores(self) -> bool:
        """True where an array is stored beside each param."""
        return self.stored_dtype is not None

    def split(self, value: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, Stored]:
        """Splits a float32 value, rounded to nearest, into a param of `dtype` and its array."""
        encoded: Any = self.encode(value, np.dtype(dtype), None)
        return halves(encoded) if self.is_packed else encoded


def _nothing(param: jax.Array) -> Stored:
    return optax.MaskedNode()


def _param_alone(param: jax.Array, stored: Stored) -> jax.Array:
    return param.astype(working_dtype(param.dtype))


def _encode_alone(value: jax.Array, dtype: np.dtype, key: jax.Array | None) -> Encoded:
    rounded = round_to(value, dtype) if key is None else round_stochastically(value, dtype, key)
    return rounded, optax.MaskedNode()


NONE = StorageMode("none", 0, init=_nothing, join=_param_alone, encode=_encode_alone)
STOCHASTIC = dataclasses.replace(NONE, name="stochastic")


FULL = StorageMode(
    "full",
    1,
    init=lambda param: param.astype(jnp.float32),
    join=lambda param, master: master,
    encode=lambda value, dtype, key: (round_to(value, dtype), value),
    stored_dtype=np.dtype("float32"),
)


REMAINDER = StorageMode(
    "remainder",
    2,
    init=lambda param: jnp.zeros_like(param, jnp.uint16),
    join=join_master,
    encode=lambda value, dtype, key: pack(value),
    stored_dtype=np.dtype("uint16"),
    param_dtypes=("bfloat16",),
    is_packed=True,
)

STORAGE_MODES: dict[str, StorageMode] = {
    mode.name: mode for mode in (FULL, REMAINDER, STOCHASTIC, NONE)
}


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


@dataclasses.dataclass(frozen=True)
class ParamUpdate:
    """The update of one param, whose float32 value is stored in a mode.

    Attributes:
      mode: the storage mode of the param's dtype.
      dtype: the param's dtype.
      as_update: True where the result is a difference for `optax.apply_updates` to add, instead of
        the param itself.
      is_wide: True where the param is its own float32 value; its update is the inner transform's.
    """

    mode: StorageMode
    dtype: np.dtype
    as_update: bool
    is_wide: bool

    @classmethod
    def of(cls, dtype: DTypeLike, master_weights: MasterWeights, as_update: bool) -> ParamUpdate:
        """Returns the update of a param of `dtype`."""
        dtype = np.dtype(dtype)
        is_wide = dtype == working_dtype(dtype)
        return cls(storage_mode(dtype, master_weights), dtype, as_update, is_wide)

    def applied(
        self, param: jax.Array, value: jax.Array, update: jax.Array, key: jax.Array | None
    ) -> Encoded:
        """Returns the result of the branch that steps to a float32 `value`."""
        if self.as_update and self.is_wide:
            return update, optax.MaskedNode()
        key = key if self.mode is STOCHASTIC else None
        return self._in_branch(self.mode.encode(value, self.dtype, key), param)

    def skipped(self, param: jax.Array, stored: Stored) -> Encoded:
        """Returns the result of the branch that changes nothing, of the same types."""
        if self.as_update and self.is_wide:
            return jnp.zeros_like(param), optax.MaskedNode()
        same = _pair(param, cast("Any", stored)) if self.mode.is_packed else (param, stored)
        return self._in_branch(same, param)

    def _in_branch(self, encoded: Encoded, param: jax.Array) -> Encoded:
        # a packed pair leaves the branch as one array, and is taken apart outside
        if self.mode.is_packed or not self.as_update:
            return encoded
        new, stored = encoded
        return _difference(new, param), stored

    def result(self, encoded: Encoded, param: jax.Array) -> tuple[jax.Array, Stored]:
        """Returns the param, or its update, and its stored array, from a branch's result."""
        if not self.mode.is_packed:
            new, stored = encoded
            return new, stored
        new, stored = halves(cast("jax.Array", encoded))
        return _difference(new, param) if self.as_update else new, stored


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the float32 difference of two half-precision arrays; infinities stay infinite."""
    wide = new.astype(jnp.float32) - old.astype(jnp.float32)
    return jnp.where(new == old, jnp.zeros_like(wide), wide)
