"""Moments in 8 bits: codes of the moment's shape, and a float32 scale for each block of 128.

A code is a small floating-point number, relative to the largest magnitude of its block. Blocks lie
within the last axis, so that codes are sharded as their params are. The formats, with the range
from the largest number to the smallest above 0:

| moment | code | range |
|---|---|---|
| first: signed | sign, 4 bits of exponent, 3 of fraction | 2^17.9 |
| other: not negative | 5 bits of exponent, 3 of fraction | 2^33.9 |

Exponents that reach far below the block's largest number are Dettmers et al.'s dynamic exponents
(2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861), with 3 bits of fraction at
every exponent instead of fewer at small ones: codes are bits of a float32, without a table.

A second moment above 0 never becomes 0: the step would be divided by epsilon alone. The smallest
root of one is 2^-17.0 of the block's largest, and thus above the smallest first moment, 2^-17.9.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy.core.quantization import Quantized, largest_magnitude
from policy.optim.storage_modes import random_bits

BLOCK = 128
"""Elements that share a scale: the lanes of a TPU's vector register."""

_ROWS = 8  # of a tile, in which a TPU stores float32
_FRACTION = 3  # bits of a code's fraction
_DROPPED = 23 - _FRACTION  # bits of a float32's fraction that a code has no room for

LARGEST_DECAY = 1 - 5 * 2.0 ** -(_FRACTION + 1)
"""The largest decay rate at which a mean that is rounded to nearest converges.

A mean x of constants g moves by (1 - rate) (g - x), and stops where that is less than half a step
between numbers, at most x · 2^-4: at 0.83 g or above.
"""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of codes in 8 bits: sign, exponent and fraction, as in a float32.

    Attributes:
      dtype: the dtype of the codes.
      exponent_bits: bits of the exponent.
      is_signed: False where numbers are not negative; those above 0 never become 0 then.
    """

    dtype: np.dtype
    exponent_bits: int
    is_signed: bool

    @property
    def bias(self) -> int:
        """The bias of the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_code(self) -> int:
        """The code of the largest magnitude."""
        return 2 ** (self.exponent_bits + _FRACTION) - 1

    @property
    def smallest_normal(self) -> np.float32:
        """The smallest number with a full fraction; below it lies a grid of equal steps."""
        return np.float32(2.0 ** (1 - self.bias))

    @property
    def largest(self) -> np.float32:
        """The largest number: that of a block's largest magnitude."""
        exponent = 2**self.exponent_bits - 1 - self.bias
        return np.float32((2 - 2.0**-_FRACTION) * 2.0**exponent)

    @property
    def smallest_scale(self) -> np.float32:
        """The smallest scale by which the smallest number above 0 is normal in float32."""
        return np.float32(2.0**-126 * 2**_FRACTION) / self.smallest_normal

    @property
    def largest_scale(self) -> np.float32:
        """The largest scale by which the largest number is finite in float32."""
        return np.float32(np.finfo(np.float32).max / self.largest * np.float32(1 - 2.0**-22))


SIGNED = Format(np.dtype("int8"), 4, is_signed=True)
POSITIVE = Format(np.dtype("uint8"), 5, is_signed=False)
FORMATS = (SIGNED, POSITIVE)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales for codes of a shape."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


@functools.partial(jax.jit, static_argnames=("form", "axes"), inline=True)
def encode(
    x: jax.Array, form: Format, key: jax.Array | None = None, axes: tuple[Hashable, ...] = ()
) -> Quantized:
    """Rounds `x` to 8-bit codes and the scales of their blocks.

    The largest magnitude of a block stays as it is. A block that holds a number that is not finite
    is NaN altogether.

    Args:
      x: (..., n) float32.
      form: the format of the codes.
      key: a PRNG key of stochastic rounding, of which the mean is `x`; None rounds to nearest.
      axes: mapped axes over which the devices share a block's scale.

    Returns:
      Codes, (..., n), and scales, (..., n / 128 rounded up) float32. Their codec is `form`.
    """
    largest = _largest_magnitudes(x)
    if axes:
        largest = lax.pmax(largest, axes)
    scales = jnp.clip(largest / form.largest, form.smallest_scale, form.largest_scale)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.full_like(scales, jnp.nan))
    codes = _codes(x, _of_elements(1 / scales, x.shape), form, key)
    return Quantized(codes, scales, codec=form)


@functools.partial(jax.jit, inline=True)
def decode(x: Quantized) -> jax.Array:
    """Returns the float32 numbers that `encode` rounded."""
    return _numbers(x.qvalue, cast("Format", x.codec)) * _of_elements(x.scale, x.shape)


def _numbers(codes: jax.Array, form: Format) -> jax.Array:
    bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)
    magnitude = bits & jnp.uint32(form.largest_code)
    fraction = magnitude << jnp.uint32(_DROPPED)
    normal = _as_float(fraction + jnp.uint32((127 - form.bias) << 23))
    small = _as_float(fraction | _bits(form.smallest_normal)) - form.smallest_normal
    x = jnp.where(magnitude < jnp.uint32(2**_FRACTION), small, normal)
    if form.is_signed:
        x = _as_float(_bits(x) | (bits >> jnp.uint32(7) << jnp.uint32(31)))
    return x


def _codes(x: jax.Array, factors: jax.Array, form: Format, key: jax.Array | None) -> jax.Array:
    scaled = jnp.abs(x) * factors
    is_small = scaled < form.smallest_normal
    # numbers of the grid plus smallest_normal are float32 numbers with the fraction of a code
    bits = _bits(jnp.where(is_small, scaled + form.smallest_normal, scaled))
    half = jnp.uint32(1 << (_DROPPED - 1))
    noise = half if key is None else random_bits(key, x.shape, _DROPPED)
    rounded = ((bits + noise) >> jnp.uint32(_DROPPED)).astype(jnp.int32)
    first = jnp.int32((127 - form.bias) << _FRACTION)
    code = rounded - first - jnp.where(is_small, jnp.int32(2**_FRACTION), jnp.int32(0))
    code = jnp.minimum(code, jnp.int32(form.largest_code))
    if form.is_signed:
        code = code | (_bits(x) >> jnp.uint32(31) << jnp.uint32(7)).astype(jnp.int32)
    else:
        code = jnp.maximum(code, (x > 0).astype(jnp.int32))
    return lax.bitcast_convert_type(code.astype(jnp.uint8), form.dtype)


def _bits(x: jax.Array | np.float32) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_magnitudes(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude of each block of (..., n); NaN where a block has one."""
    if not _has_tiles(x.shape):
        return largest_magnitude(x, lambda bits: _in_blocks(bits).max(axis=-1, initial=0))
    of_platforms: Any = functools.partial(
        lax.platform_dependent,
        tpu=lambda bits: _from_tiles(_in_tiles(bits).max(axis=-1, keepdims=True)),
        default=lambda bits: _in_blocks(bits).max(axis=-1),
    )
    return largest_magnitude(x, of_platforms)


def _of_elements(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the scales of blocks for each of their elements: (..., blocks) to `shape`."""
    if not _has_tiles(shape):
        return _from_blocks(scales, shape)
    return lax.platform_dependent(
        scales,
        tpu=lambda scales: _from_tiles(jnp.repeat(_in_tiles(scales, 1), BLOCK, axis=-1)),
        default=lambda scales: _from_blocks(scales, shape),
    )


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns (..., n) as (..., blocks, width), filled up with zeros."""
    *lead, n = x.shape
    *spec, last = _explicit_spec(x)
    if n % BLOCK or n < BLOCK:
        x, last = _with_spec(x, (*spec, None)), None
    if n <= BLOCK:
        return x[..., None, :]
    if n % BLOCK:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % BLOCK)])
    return _reshape(x, (*lead, -(-n // BLOCK), BLOCK), (*spec, last, None))


def _from_blocks(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if scales.shape[-1] == 1:
        return jnp.broadcast_to(scales, shape)
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, BLOCK))
    blocks = scales.shape[-1]
    return _reshape(wide, (*shape[:-1], blocks * BLOCK), _explicit_spec(scales))[..., : shape[-1]]


def _has_tiles(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-1] % BLOCK == 0 and shape[-2] % _ROWS == 0


def _in_tiles(x: jax.Array, width: int = BLOCK) -> jax.Array:
    """Returns (..., rows, blocks · width) as (..., rows / 8, blocks, 8, width).

    A TPU stores float32 in tiles of 8 x 128, so that this moves nothing there. Its compiler fuses
    reductions and broadcasts of tiles, and writes those of (..., rows, blocks, 128) to memory.
    """
    *more, rows, n = x.shape
    *spec, row, last = _explicit_spec(x)
    split = (*more, rows // _ROWS, _ROWS, n // width, width)
    return _reshape(x, split, (*spec, row, None, last, None)).swapaxes(-3, -2)


def _from_tiles(x: jax.Array) -> jax.Array:
    """Undoes `_in_tiles`."""
    *more, groups, blocks, rows, width = x.shape
    *spec, row, last, _, _ = _explicit_spec(x)
    merged = (*more, groups * rows, blocks * width)
    return _reshape(x.swapaxes(-3, -2), merged, (*spec, row, last))


# Reshapes of arrays whose types say how they are sharded, on a mesh of explicit axes


def _explicit_spec(x: jax.Array) -> tuple[Any, ...]:
    """Returns the names of the mesh axes that each axis of `x` is sharded over by its type.

    They are None off a mesh of explicit axes.
    """
    spec = jax.typeof(x).sharding.spec if _is_explicit(x) else ()
    return (*spec, *[None] * (x.ndim - len(spec)))


def _with_spec(x: jax.Array, spec: tuple[Any, ...]) -> jax.Array:
    """Returns `x` sharded over the mesh axes of `spec`, on a mesh of explicit axes."""
    return jax.reshard(x, PartitionSpec(*spec)) if _is_explicit(x) else x


def _reshape(x: jax.Array, shape: tuple[int, ...], spec: tuple[Any, ...]) -> jax.Array:
    """Returns `x` in another shape, on a mesh of explicit axes sharded over those of `spec`.

    An axis whose length they don't divide is replicated.
    """
    if not _is_explicit(x):
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    devices = [math.prod(mesh.shape[name] for name in jax.tree.leaves(axes)) for axes in spec]
    fits = [length % count == 0 for length, count in zip(shape, devices, strict=True)]
    kept = [axes if is_fit else None for axes, is_fit in zip(spec, fits, strict=True)]
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*kept)))


def _is_explicit(x: jax.Array) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
