"""Code that writes its matmuls in 8 bits by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.policy.inspect.audit.corpus.planting import (
    E4M3,
    F32,
    I8,
    plant,
)


def dot(x: Any, w: Any, result: Any) -> Any:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=result)


def codes(x: Any, dtype: Any = E4M3) -> tuple[Any, Any]:
    """An array in 8 bits, by one scale that is computed from it."""
    limit = 127.0 if dtype == I8 else float(jnp.finfo(dtype).max)
    wide = x.astype(F32)
    scale = jnp.max(jnp.abs(wide)) / limit
    quotient = wide / scale
    return (jnp.round(quotient) if dtype == I8 else quotient).astype(dtype), scale


def _widened(dtype: Any, to: Any) -> Any:
    def run(x: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(x + 1, dtype)
        return (left.astype(to) * s.astype(to)) @ (right.astype(to) * t.astype(to))

    return run


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


plant(
    """
unscaled-cast convert_element_type(x=F32)
    operands that are cast to float8 as they are: dot(x.astype(E4M3), x.astype(E4M3), F32)
    weights that are cast to int8 without a scale: dot(x.astype(I8), codes(x, I8)[0], I32)
    int8 codes that are returned: jnp.round(x * 10).astype(I8)
    limits beyond those of float8_e4m3fn: jnp.clip(x, -57344, 57344).astype(E4M3).astype(F32)
    a limit at one end only: jnp.minimum(x, 448).astype(E4M3).astype(F32)
    a clip before a product: (jnp.clip(x, -1, 1) * 1000).astype(E4M3).astype(F32)
    a scale that comes after the cast:
        x.astype(E4M3).astype(F32) / jnp.max(jnp.abs(x.astype(E4M3).astype(F32)))
unscaled-cast convert_element_type
    a cast to float8_e5m2: jnp.tanh(x) * (x * 2).astype(E5M2).astype(BF16)
    a cache of keys in float8: (x @ x).astype(E4M3)
unscaled-cast convert_element_type(x=F32, scale=F32)
    a scale that was stored, without a clip:
        (x / scale[0, 0]).astype(E4M3).astype(F32) * scale[0, 0]
    the scale of another array: (x / (jnp.max(jnp.abs(scale)) / 448)).astype(E4M3).astype(F32)
unscaled-cast convert_element_type(x=E4M3, backward=True)
    cotangents of a widening cast: jnp.tanh(x.astype(F32))
dequantised-matmul dot_general(x=I8, w=I8)
    codes that are widened, and their product scaled: x.astype(BF16) @ w.astype(BF16) * BF16(0.01)
narrow-accumulator dot_general(x=I8, w=I8)
    an int8 dot that returns int8: x @ w
    an int8 dot that returns int16: dot(x, w, jnp.int16)
narrow-accumulator dot_general(x=F32)
    a float8 dot that returns float8: dot(codes(x)[0], codes(x + 1)[0], E4M3).astype(F32)
    a float8 dot that returns float16: dot(codes(x)[0], codes(x + 1, E5M2)[0], F16)
clean(x=F32, s=F32, backward=False)
    a dot of float8 by scales of its operands: _with_scales(E4M3, F32)(x, s)
    a dot of float8 that returns bfloat16: _with_scales(E4M3, BF16)(x, s)
    a dot of int8 by scales of its operands: _with_scales(I8, I32)(x, s)
    a stored scale and a clip: jnp.clip(x / s[0, 0], -448, 448).astype(E4M3)
    noise before the rounding:
        jnp.clip(jnp.floor(x / (jnp.max(jnp.abs(x)) / 127) + s), -127, 127).astype(I8)
clean(x=F32, backward=False)
    a scale by rows: _by_rows_of_another_device_too(x)
    blocks that have a scale each: _by_blocks(x)
    a round trip through 8 bits that is scaled: _there_and_back(x)
    a reciprocal that is multiplied:
        (x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)).astype(E4M3)
    a scale that a norm gives: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2)
    a sign: jnp.sign(x).astype(I8)
    a multiple of a sigmoid: (jax.nn.sigmoid(x) * 100).astype(E4M3)
    a bounded function: jnp.tanh(x).astype(I8)
    probabilities in 8 bits: jax.nn.softmax(x).astype(E4M3)
    flags and small integers: ((x > 0).astype(I8), jnp.full((4,), 3.0).astype(I8))
    labels: jnp.argmax(x, -1).astype(I8)
    buckets that are only compared: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0)
clean(x=BF16, w=I8, scale=F32, backward=False)
    weights that are stored in int8: x @ (w.astype(BF16) * scale[:1].astype(BF16))
clean(x=BF16, w=E4M3, backward=False)
    weights that are stored in float8 after a gate:
        x @ w.astype(BF16) * jax.nn.sigmoid(x) @ w.astype(BF16)
clean(x=I8, w=I8, backward=False)
    codes of both sides of which one goes through a function:
        jax.nn.silu(x.astype(BF16)) @ w.astype(BF16)
clean(i=I32, x=F32)
    a dot of integers beside one of float32: (i @ i, x @ x)
dequantised-matmul dot_general(x=F32)
    a dot of float8_e4m3fn codes in bfloat16: _widened(E4M3, BF16)(x)
    a dot of float8_e4m3fn codes in float32: _widened(E4M3, F32)(x)
    a dot of int8 codes in bfloat16: _widened(I8, BF16)(x)
    a dot of int8 codes in float32: _widened(I8, F32)(x)
dequantised-matmul dot_general(x=I8, w=I8, scale=F32)
    codes with a zero point by rows:
        rows = (x.astype(F32) - 3) * scale[:, :1]
        rows.T @ (w.astype(F32) * scale[:1].T)
dequantised-matmul conv_general_dilated(x=F32)
    a convolution of codes that were widened:
        (left, s), (right, t) = codes(x), codes(x + 1)
        image, kernel = left.astype(BF16)[None, :, :, None], right.astype(BF16)[:2, :2, None, None]
        numbers = ("NHWC", "HWIO", "NHWC")
        product = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        product[0, :, :, 0].astype(F32) * s * t
"""
)
