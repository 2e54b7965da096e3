"""Code that writes its matmuls in 8 bits by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import ACCUMULATOR, DEQUANTISED, UNSCALED
from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    CAST,
    DOT,
    F16,
    F32,
    I8,
    I32,
    clean,
    faults,
)

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def dot(x: Any, w: Any, result: Any) -> Any:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=result)


def codes(x: Any, dtype: Any = E4M3) -> tuple[Any, Any]:
    """An array in 8 bits, by one scale that is computed from it."""
    limit = 127.0 if dtype == I8 else float(jnp.finfo(dtype).max)
    wide = x.astype(F32)
    scale = jnp.max(jnp.abs(wide)) / limit
    quotient = wide / scale
    return (jnp.round(quotient) if dtype == I8 else quotient).astype(dtype), scale


# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------

faults(UNSCALED, CAST, F32)(
    {
        "operands that are cast to float8 as they are": lambda x: dot(
            x.astype(E4M3), x.astype(E4M3), F32
        ),
        "weights that are cast to int8 without a scale": lambda x: dot(
            x.astype(I8), codes(x, I8)[0], I32
        ),
        "int8 codes that are returned": lambda x: jnp.round(x * 10).astype(I8),
        "limits beyond those of float8_e4m3fn": lambda x: (
            jnp.clip(x, -57344, 57344).astype(E4M3).astype(F32)
        ),
        "a limit at one end only": lambda x: jnp.minimum(x, 448).astype(E4M3).astype(F32),
        "a clip before a product": lambda x: (jnp.clip(x, -1, 1) * 1000).astype(E4M3).astype(F32),
        "a scale that comes after the cast": lambda x: (
            x.astype(E4M3).astype(F32) / jnp.max(jnp.abs(x.astype(E4M3).astype(F32)))
        ),
    }
)
faults(UNSCALED, CAST)(
    {
        "a cast to float8_e5m2": lambda x: jnp.tanh(x) * (x * 2).astype(E5M2).astype(BF16),
        "a cache of keys in float8": lambda x: (x @ x).astype(E4M3),
    }
)
faults(UNSCALED, CAST, F32, F32)(
    {
        "a scale that was stored, without a clip": lambda x, scale: (
            (x / scale[0, 0]).astype(E4M3).astype(F32) * scale[0, 0]
        ),
        "the scale of another array": lambda x, y: (
            (x / (jnp.max(jnp.abs(y)) / 448)).astype(E4M3).astype(F32)
        ),
    }
)
faults(UNSCALED, CAST, E4M3, backward=True)(
    {"cotangents of a widening cast": lambda x: jnp.tanh(x.astype(F32))}
)

# --------------------------------------------------------------------------------------------------
# Codes that are widened before they are multiplied
# --------------------------------------------------------------------------------------------------


def _widened(dtype: Any, to: Any) -> Any:
    def run(x: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(x + 1, dtype)
        return (left.astype(to) * s.astype(to)) @ (right.astype(to) * t.astype(to))

    return run


faults(DEQUANTISED, DOT, F32)(
    {
        f"a dot of {jnp.dtype(dtype)} codes in {jnp.dtype(to)}": _widened(dtype, to)
        for dtype in (E4M3, I8)
        for to in (BF16, F32)
    }
)
faults(DEQUANTISED, DOT, I8, I8)(
    {
        "codes that are widened, and their product scaled": lambda x, w: (
            x.astype(BF16) @ w.astype(BF16) * BF16(0.01)
        )
    }
)


@faults(DEQUANTISED, DOT, I8, I8, F32)
def _codes_with_a_zero_point_by_rows(x, w, scale):
    rows = (x.astype(F32) - 3) * scale[:, :1]
    return rows.T @ (w.astype(F32) * scale[:1].T)


@faults(DEQUANTISED, "conv_general_dilated", F32)
def _a_convolution_of_codes_that_were_widened(x):
    (left, s), (right, t) = codes(x), codes(x + 1)
    image, kernel = left.astype(BF16)[None, :, :, None], right.astype(BF16)[:2, :2, None, None]
    numbers = ("NHWC", "HWIO", "NHWC")
    product = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return product[0, :, :, 0].astype(F32) * s * t


# --------------------------------------------------------------------------------------------------
# Accumulators
# --------------------------------------------------------------------------------------------------

faults(ACCUMULATOR, DOT, I8, I8)(
    {
        "an int8 dot that returns int8": lambda x, w: x @ w,
        "an int8 dot that returns int16": lambda x, w: dot(x, w, jnp.int16),
    }
)
faults(ACCUMULATOR, DOT, F32)(
    {
        "a float8 dot that returns float8": lambda x: dot(
            codes(x)[0], codes(x + 1)[0], E4M3
        ).astype(F32),
        "a float8 dot that returns float16": lambda x: dot(codes(x)[0], codes(x + 1, E5M2)[0], F16),
    }
)

# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------


def _with_scales(dtype: Any, result: Any) -> Any:
    def fn(x: Any, w: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(w, dtype)
        return dot(left, right, result).astype(F32) * s * t

    return fn


def _by_rows_of_another_device_too(x: Any) -> Any:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True) / 448, 1e-12)
    return (x / jnp.where(scale > 0, scale, 1)).astype(E4M3)


def _by_blocks(x: Any) -> Any:
    blocks = x.reshape(2, 2, 4)
    largest = jnp.max(jnp.abs(blocks), (1, 2), keepdims=True)
    return jnp.round(blocks / largest * 127).astype(I8).reshape(4, 4)


def _there_and_back(x: Any) -> Any:
    narrow, scale = codes(x, E4M3)
    return jnp.tanh(narrow.astype(F32) * scale)


clean(F32, F32, backward=False)(
    {
        "a dot of float8 by scales of its operands": _with_scales(E4M3, F32),
        "a dot of float8 that returns bfloat16": _with_scales(E4M3, BF16),
        "a dot of int8 by scales of its operands": _with_scales(I8, I32),
        "a stored scale and a clip": lambda x, s: jnp.clip(x / s[0, 0], -448, 448).astype(E4M3),
        "noise before the rounding": lambda x, noise: jnp.clip(
            jnp.floor(x / (jnp.max(jnp.abs(x)) / 127) + noise), -127, 127
        ).astype(I8),
    }
)
clean(F32, backward=False)(
    {
        "a scale by rows": _by_rows_of_another_device_too,
        "blocks that have a scale each": _by_blocks,
        "a round trip through 8 bits that is scaled": _there_and_back,
        "a reciprocal that is multiplied": lambda x: (
            x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)
        ).astype(E4M3),
        "a scale that a norm gives": lambda x: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2),
        "a sign": lambda x: jnp.sign(x).astype(I8),
        "a multiple of a sigmoid": lambda x: (jax.nn.sigmoid(x) * 100).astype(E4M3),
        "a bounded function": lambda x: jnp.tanh(x).astype(I8),
        "probabilities in 8 bits": lambda x: jax.nn.softmax(x).astype(E4M3),
        "flags and small integers": lambda x: ((x > 0).astype(I8), jnp.full((4,), 3.0).astype(I8)),
        "labels": lambda x: jnp.argmax(x, -1).astype(I8),
        "buckets that are only compared": lambda x: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0),
    }
)
clean(BF16, I8, F32, backward=False)(
    {
        "weights that are stored in int8": lambda x, w, scale: (
            x @ (w.astype(BF16) * scale[:1].astype(BF16))
        )
    }
)
clean(BF16, E4M3, backward=False)(
    {
        "weights that are stored in float8 after a gate": lambda x, w: (
            ((x @ w.astype(BF16)) * jax.nn.sigmoid(x)) @ w.astype(BF16)
        )
    }
)
clean(I8, I8, backward=False)(
    {
        "codes of both sides of which one goes through a function": lambda x, w: (
            jax.nn.silu(x.astype(BF16)) @ w.astype(BF16)
        )
    }
)
clean(I32, F32)({"a dot of integers beside one of float32": lambda i, x: (i @ i, x @ x)})
