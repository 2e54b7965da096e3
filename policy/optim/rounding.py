"""Rounding of float32 to half dtypes: to nearest, so that it can be undone, and stochastically."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.optim.finiteness import mapped_axes

_HALF = 0x8000  # half of a bfloat16 ulp, in the bits of a float32


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to a param's dtype, to nearest.

    Ties of float32 to bfloat16 are rounded away from zero: `bits + 0x8000`, cut, which can be
    undone from the low 16 bits. All others are rounded to even. Overflows to infinity exactly where
    rounding to nearest does (from 2^128 - 2^119 on). NaN stays NaN.
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    return _halves(pack(x), dtype)[0]


def pack(x: jax.Array) -> jax.Array:
    """Packs float32 into uint32: `round_to(x, bfloat16)` in the high half, the rest in the low one.

    `split` takes the halves apart, and `join_master` makes the float32 of them.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    quiet_nan = (bits & jnp.uint32(0xFFFF0000)) | jnp.uint32(0x400000 | _HALF)
    return jnp.where(jnp.isnan(x), quiet_nan, bits + jnp.uint32(_HALF))


def split(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits the result of `pack` into a bfloat16 param and the low 16 bits of its master, uint16.

    These are 0 where the param equals its master.
    """
    param, low = halves(packed, jnp.bfloat16)
    return param, low ^ jnp.uint16(_HALF)


def halves(pair: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the high 16 bits of a uint32 array as a half dtype, and the low ones as uint16."""
    if dtype != jnp.bfloat16:
        return _halves(pair, dtype)
    return lax.platform_dependent(
        pair, tpu=_halves_in_turn, default=lambda pair: _halves(pair, dtype)
    )


def _halves(pair: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    high = (pair >> jnp.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(high, dtype), pair.astype(jnp.uint16)


def _halves_in_turn(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the low half from the high one.

    A TPU's compiler writes two results that depend on each other in one pass, and two that don't in
    one pass each.
    """
    high = lax.bitcast_convert_type(pair & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return high, (pair ^ bits).astype(jnp.uint16)


def packed(param: jax.Array, low: jax.Array) -> jax.Array:
    """Packs a param and its low bits in the uint32 that `split` takes apart."""
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    return (high << jnp.uint32(16)) | (low ^ jnp.uint16(_HALF)).astype(jnp.uint32)


def join_master(param: jax.Array, low: jax.Array) -> jax.Array:
    """Joins a bfloat16 param and its low 16 bits into the float32 master.

    A param that was written to since is honoured to within one ulp of bfloat16. Two stale low
    halves would make a NaN: one below zero beside ±0, and one above beside ±infinity. There the
    master is the param.
    """
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    above = low < jnp.uint16(_HALF)
    # in bits: a comparison of floats takes a subnormal for 0
    magnitude = high & jnp.uint32(0x7FFF0000)
    alone = ((magnitude == 0) & ~above) | ((magnitude == jnp.uint32(0x7F800000)) & above)
    bits = jnp.where(alone, high, packed(param, low) - jnp.uint32(_HALF))
    return lax.bitcast_convert_type(bits, jnp.float32)


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
      axis_name: see `mapped_axes`.
      first: the number of the first leaf.
    """
    if key is None:
        return [None] * len(leaves)
    key, keys = jax.random.fold_in(key, count), []
    for number, axes in enumerate(mapped_axes(leaves, axis_name), first):
        leaf_key = jax.random.fold_in(key, number)
        for axis in sorted(axes, key=str):
            leaf_key = jax.random.fold_in(leaf_key, lax.axis_index(axis))
        keys.append(leaf_key)
    return keys
