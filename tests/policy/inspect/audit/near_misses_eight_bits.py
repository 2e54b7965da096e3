"""Programs in 8 bits with nothing wrong in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.policy.inspect.audit.eight_bit_faults import E4M3, E5M2, I8, codes, dot
from tests.policy.inspect.audit.near_misses import (
    BF16,
    F32,
    Program,
    forward_only,
    near_miss,
    shape,
)

X = shape(4, 4)


def with_a_matmul(make: Program) -> Program:
    """Adds a program without a matmul, with one beside it."""

    def made() -> Any:
        fn, args = make()
        return lambda *given: (fn(*given), jnp.ones((4, 4)) @ jnp.ones((4, 4))), args

    made.__name__ = make.__name__
    near_miss(made)
    return made


def _with_scales(dtype: Any, result: Any) -> Any:
    def fn(x: Any, w: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(w, dtype)
        return dot(left, right, result).astype(F32) * s * t

    return fn


@near_miss
@forward_only
def _a_dot_of_float8_by_scales_of_its_operands():
    return _with_scales(E4M3, F32), (X, X)


@near_miss
@forward_only
def _a_dot_of_float8_that_returns_bfloat16():
    return _with_scales(E4M3, BF16), (X, X)


@near_miss
@forward_only
def _a_dot_of_int8_by_scales_of_its_operands():
    return _with_scales(I8, jnp.int32), (X, X)


@with_a_matmul
@forward_only
def _a_scale_by_rows_of_what_another_device_holds_too():
    def fn(x):
        scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True) / 448, 1e-12)
        return (x / jnp.where(scale > 0, scale, 1)).astype(E4M3)

    return fn, (X,)


@with_a_matmul
@forward_only
def _a_reciprocal_that_is_multiplied():
    def fn(x):
        return (x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)).astype(E4M3)

    return fn, (X,)


@with_a_matmul
@forward_only
def _a_scale_that_a_norm_gives():
    return lambda x: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2), (X,)


@with_a_matmul
@forward_only
def _blocks_that_have_a_scale_each():
    def fn(x):
        blocks = x.reshape(2, 2, 4)
        largest = jnp.max(jnp.abs(blocks), (1, 2), keepdims=True)
        return jnp.round(blocks / largest * 127).astype(I8).reshape(4, 4)

    return fn, (X,)


@with_a_matmul
@forward_only
def _a_stored_scale_and_a_clip():
    def fn(x, scale):
        return jnp.clip(x / scale[0, 0], -448, 448).astype(E4M3)

    return fn, (X, X)


@with_a_matmul
@forward_only
def _noise_before_the_rounding():
    def fn(x, noise):
        scale = jnp.max(jnp.abs(x)) / 127
        return jnp.clip(jnp.floor(x / scale + noise), -127, 127).astype(I8)

    return fn, (X, X)


@with_a_matmul
@forward_only
def _bounded_functions_in_8_bits():
    def fn(x):
        return (
            jnp.sign(x).astype(I8),
            (jax.nn.sigmoid(x) * 100).astype(E4M3),
            jnp.tanh(x).astype(I8),
        )

    return fn, (X,)


@with_a_matmul
@forward_only
def _probabilities_in_8_bits():
    return lambda x: jax.nn.softmax(x).astype(E4M3), (X,)


@with_a_matmul
@forward_only
def _flags_and_small_integers_in_int8():
    def fn(x, labels):
        return (x > 0).astype(I8), labels.astype(I8), jnp.full((4,), 3.0).astype(I8)

    return fn, (X, shape(4, dtype=jnp.int32))


@with_a_matmul
def _buckets_that_are_only_compared():
    return lambda x: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0), (X,)


@near_miss
@forward_only
def _weights_that_are_stored_in_int8():
    def fn(x, w, scale):
        return x @ (w.astype(BF16) * scale[:1].astype(BF16))

    return fn, (shape(4, 4, dtype=BF16), shape(4, 4, dtype=I8), X)


@near_miss
@forward_only
def _weights_that_are_stored_in_float8_after_a_gate():
    def fn(x, w):
        gate = (x @ w.astype(BF16)) * jax.nn.sigmoid(x)
        return gate @ w.astype(BF16)

    return fn, (shape(4, 4, dtype=BF16), shape(4, 4, dtype=E4M3))


@near_miss
@forward_only
def _codes_of_both_sides_of_which_one_goes_through_a_function():
    def fn(x, w):
        return jax.nn.silu(x.astype(BF16)) @ w.astype(BF16)

    return fn, (shape(4, 4, dtype=I8), shape(4, 4, dtype=I8))


@near_miss
def _a_dot_of_integers_beside_one_of_float32():
    return lambda i, x: (i @ i, x @ x), (shape(4, 4, dtype=jnp.int32), X)


@with_a_matmul
@forward_only
def _a_round_trip_through_8_bits_that_is_scaled():
    def fn(x):
        narrow, scale = codes(x, E4M3)
        return jnp.tanh(narrow.astype(F32) * scale)

    return fn, (X,)
