"""Rounding float32 to a half dtype: to nearest, so that it can be taken apart again, and stochastically."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_HALF = 0x8000  # half of a bfloat16 ulp, in the bits of a float32


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in a param's dtype. float32 to bfloat16 rounds to nearest, half away from zero; the rest half to even.

    Half away from zero is `bits + 0x8000`, cut: unlike half to even, it can be taken apart again from the low 16 bits.
    It overflows to infinity exactly where rounding to nearest does (from 2^128 - 2^119 on). NaN stays NaN.
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    return _halves(pack(x), dtype)[0]


def pack(x: jax.Array) -> jax.Array:
    """float32 as uint32: `round_to(x, bfloat16)` in the high half, and in the low one what `join` needs beside it."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    quiet_nan = (bits & jnp.uint32(0xFFFF0000)) | jnp.uint32(0x400000 | _HALF)
    return jnp.where(jnp.isnan(x), quiet_nan, bits + jnp.uint32(_HALF))


def split(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bfloat16 param, and the low 16 bits of its float32 master as uint16: 0 where the two are equal."""
    param, low = halves(packed, jnp.bfloat16)
    return param, low ^ jnp.uint16(_HALF)


def halves(pair: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The high 16 bits of a uint32 array as a half dtype, and the low ones as uint16."""
    if dtype != jnp.bfloat16:
        return _halves(pair, dtype)
    return lax.platform_dependent(pair, tpu=_halves_in_turn, default=lambda pair: _halves(pair, dtype))


def _halves(pair: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    high = (pair >> jnp.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(high, dtype), pair.astype(jnp.uint16)


def _halves_in_turn(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low half is what the high one leaves of `pair`: a TPU's compiler writes two results that depend on each other
    in one pass, and two that don't in one pass each.
    """
    high = lax.bitcast_convert_type(pair & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    return high, (pair ^ bits).astype(jnp.uint16)


def packed(param: jax.Array, low: jax.Array) -> jax.Array:
    """Packs a param and its low bits in the uint32 that `split` takes apart."""
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
    return (high << jnp.uint32(16)) | (low ^ jnp.uint16(_HALF)).astype(jnp.uint32)


def join(param: jax.Array, low: jax.Array) -> jax.Array:
    """The float32 master of a bfloat16 param and its low 16 bits.

    A param that was written to since is honoured to within one ulp of bfloat16. Two stale low halves would make a NaN:
    one below zero beside ±0, and one above beside ±infinity. There the master is the param.
    """
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    above = low < jnp.uint16(_HALF)
    # in bits: a comparison of floats takes a subnormal for 0
    magnitude = high & jnp.uint32(0x7FFF0000)
    alone = ((magnitude == 0) & ~above) | ((magnitude == jnp.uint32(0x7F800000)) & above)
    bits = jnp.where(alone, high, packed(param, low) - jnp.uint32(_HALF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_stochastically(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """float32 `x` as one of its two neighbours in a half dtype, the nearer one the likelier, so that the mean is `x`.

    What the dtype holds stays as it is, NaN and infinities too. Where rounding up would overflow, it rounds to nearest.
    """
    noise = _noise(key, x.shape)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    dropped = 16 if dtype == jnp.bfloat16 else 13  # mantissa bits of float32 that the dtype has no room for
    mask = np.uint32((1 << dropped) - 1)
    up = lax.bitcast_convert_type((bits + (noise & mask)) & ~mask, jnp.float32)
    if dtype != jnp.bfloat16:  # below its smallest normal, 2^-14, float16 is a grid of 2^-24
        steps = jnp.floor(jnp.abs(x) * np.float32(2.0**24) + noise.astype(jnp.float32) * np.float32(2.0**-16))
        up = jnp.where(jnp.abs(x) < np.float32(2.0**-14), jnp.copysign(steps * np.float32(2.0**-24), x), up)
    rounded = up.astype(dtype)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(rounded), rounded, round_to(x, dtype))


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """16 random bits an element, as uint32: two rounds of an integer hash over the key's words and the position.

    `jax.random.bits` is as random as encryption needs, and XLA:CPU moves 56 bytes an element for it; this fuses into
    the rounding. The mixer is C. Wellons's `lowbias32` (2018, "Prospecting for Hash Functions").
    """
    words = (jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key).reshape(-1)
    x = jnp.full(shape, words[0])
    for dimension in range(len(shape)):
        stride = np.uint32(np.prod(shape[dimension + 1 :], dtype=np.uint64) & np.uint64(0xFFFFFFFF))
        x = x + lax.broadcasted_iota(jnp.uint32, shape, dimension) * stride
    return _mix(_mix(x) ^ words[-1]) >> jnp.uint32(16)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
