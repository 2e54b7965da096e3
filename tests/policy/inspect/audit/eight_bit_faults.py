"""Faults of code that writes its matmuls in 8 bits by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import ACCUMULATOR, DEQUANTISED, UNSCALED
from tests.policy.inspect.audit.faults import BF16, F16, F32, fault

E4M3, E5M2, I8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
CAST, DOT = "convert_element_type", "dot_general"


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


fault("operands that are cast to float8 as they are", UNSCALED, CAST, F32)(
    lambda x: dot(x.astype(E4M3), x.astype(E4M3), F32)
)
fault("a cast to float8_e5m2", UNSCALED, CAST)(
    lambda x: jnp.tanh(x).astype(BF16) * (x * 2).astype(E5M2).astype(BF16)
)
fault("weights that are cast to int8 without a scale", UNSCALED, CAST, F32)(
    lambda x: dot(x.astype(I8), codes(x, I8)[0], jnp.int32)
)
fault("int8 codes that are returned", UNSCALED, CAST, F32)(lambda x: jnp.round(x * 10).astype(I8))
fault("a scale that was stored, without a clip", UNSCALED, CAST, F32, F32)(
    lambda x, scale: (x / scale[0, 0]).astype(E4M3).astype(F32) * scale[0, 0]
)


@fault("the scale of another array", UNSCALED, CAST, F32, F32)
def _of_another(x, y):
    scale = jnp.max(jnp.abs(y)) / 448
    return (x / scale).astype(E4M3).astype(F32) * scale


@fault("a scale that comes after the cast", UNSCALED, CAST, F32)
def _after(x):
    narrow = x.astype(E4M3).astype(F32)
    return narrow / jnp.max(jnp.abs(narrow))


fault("limits beyond those of float8_e4m3fn", UNSCALED, CAST, F32)(
    lambda x: jnp.clip(x, -57344, 57344).astype(E4M3).astype(F32)
)
fault("a limit at one end only", UNSCALED, CAST, F32)(
    lambda x: jnp.minimum(x, 448).astype(E4M3).astype(F32)
)
fault("a clip before a product", UNSCALED, CAST, F32)(
    lambda x: (jnp.clip(x, -1, 1) * 1000).astype(E4M3).astype(F32)
)
fault("cotangents of a widening cast", UNSCALED, CAST, E4M3, backward=True)(
    lambda x: jnp.tanh(x.astype(F32))
)


# --------------------------------------------------------------------------------------------------
# Codes that are widened before they are multiplied
# --------------------------------------------------------------------------------------------------


def _widened(dtype: Any, to: Any) -> Any:
    def run(x: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(x + 1, dtype)
        return (left.astype(to) * s.astype(to)) @ (right.astype(to) * t.astype(to))

    return run


for _dtype in (E4M3, I8):
    for _to in (BF16, F32):
        fault(f"a dot of {jnp.dtype(_dtype)} codes in {jnp.dtype(_to)}", DEQUANTISED, DOT, F32)(
            _widened(_dtype, _to)
        )


fault("codes that are widened, and their product scaled", DEQUANTISED, DOT, I8, I8)(
    lambda x, w: x.astype(BF16) @ w.astype(BF16) * BF16(0.01)
)


@fault("codes with a zero point, by rows", DEQUANTISED, DOT, I8, I8, F32)
def _zero_point(x, w, scale):
    rows = (x.astype(F32) - 3) * scale[:, :1]
    return rows.T @ (w.astype(F32) * scale[:1].T)


@fault("a convolution of codes that were widened", DEQUANTISED, "conv_general_dilated", F32)
def _convolution(x):
    (left, s), (right, t) = codes(x), codes(x + 1)
    image, kernel = left.astype(BF16)[None, :, :, None], right.astype(BF16)[:2, :2, None, None]
    numbers = ("NHWC", "HWIO", "NHWC")
    product = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return product[0, :, :, 0].astype(F32) * s * t


# --------------------------------------------------------------------------------------------------
# Accumulators
# --------------------------------------------------------------------------------------------------


fault("an int8 dot that returns int8", ACCUMULATOR, DOT, I8, I8)(lambda x, w: x @ w)
fault("a float8 dot that returns float8", ACCUMULATOR, DOT, F32)(
    lambda x: dot(codes(x)[0], codes(x + 1)[0], E4M3).astype(F32)
)
fault("a float8 dot that returns float16", ACCUMULATOR, DOT, F32)(
    lambda x: dot(codes(x)[0], codes(x + 1, E5M2)[0], F16)
)
