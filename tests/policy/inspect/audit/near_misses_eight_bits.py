"""Programs in 8 bits with nothing wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.policy.inspect.audit.eight_bit_faults import E4M3, E5M2, I8, codes, dot
from tests.policy.inspect.audit.near_misses import BF16, F32, near_miss, shape

X = shape(4, 4)


def with_a_matmul(name: str, *args: Any, forward_only: bool = False) -> Callable[[Any], Any]:
    """Adds a function without a matmul, with one beside it."""

    def add(fn: Any) -> Any:
        near_miss(name, *args, forward_only=forward_only)(
            lambda *given: (fn(*given), jnp.ones((4, 4)) @ jnp.ones((4, 4)))
        )
        return fn

    return add


def _with_scales(dtype: Any, result: Any) -> Any:
    def fn(x: Any, w: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(w, dtype)
        return dot(left, right, result).astype(F32) * s * t

    return fn


near_miss("a dot of float8 by scales of its operands", X, X, forward_only=True)(
    _with_scales(E4M3, F32)
)
near_miss("a dot of float8 that returns bfloat16", X, X, forward_only=True)(
    _with_scales(E4M3, BF16)
)
near_miss("a dot of int8 by scales of its operands", X, X, forward_only=True)(
    _with_scales(I8, jnp.int32)
)


@with_a_matmul("a scale by rows of what another device holds too", X, forward_only=True)
def _a_scale_by_rows_of_what_another_device_holds_too(x):
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True) / 448, 1e-12)
    return (x / jnp.where(scale > 0, scale, 1)).astype(E4M3)


with_a_matmul("a reciprocal that is multiplied", X, forward_only=True)(
    lambda x: (x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)).astype(E4M3)
)
with_a_matmul("a scale that a norm gives", X, forward_only=True)(
    lambda x: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2)
)


@with_a_matmul("blocks that have a scale each", X, forward_only=True)
def _blocks_that_have_a_scale_each(x):
    blocks = x.reshape(2, 2, 4)
    largest = jnp.max(jnp.abs(blocks), (1, 2), keepdims=True)
    return jnp.round(blocks / largest * 127).astype(I8).reshape(4, 4)


with_a_matmul("a stored scale and a clip", X, X, forward_only=True)(
    lambda x, scale: jnp.clip(x / scale[0, 0], -448, 448).astype(E4M3)
)


@with_a_matmul("noise before the rounding", X, X, forward_only=True)
def _noise_before_the_rounding(x, noise):
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.clip(jnp.floor(x / scale + noise), -127, 127).astype(I8)


with_a_matmul("bounded functions in 8 bits", X, forward_only=True)(
    lambda x: (
        jnp.sign(x).astype(I8),
        (jax.nn.sigmoid(x) * 100).astype(E4M3),
        jnp.tanh(x).astype(I8),
    )
)
with_a_matmul("probabilities in 8 bits", X, forward_only=True)(
    lambda x: jax.nn.softmax(x).astype(E4M3)
)
with_a_matmul("flags and small integers in int8", X, shape(4, dtype=jnp.int32), forward_only=True)(
    lambda x, labels: ((x > 0).astype(I8), labels.astype(I8), jnp.full((4,), 3.0).astype(I8))
)
with_a_matmul("buckets that are only compared", X)(
    lambda x: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0)
)
near_miss(
    "weights that are stored in int8",
    shape(4, 4, dtype=BF16),
    shape(4, 4, dtype=I8),
    X,
    forward_only=True,
)(lambda x, w, scale: x @ (w.astype(BF16) * scale[:1].astype(BF16)))


@near_miss(
    "weights that are stored in float8 after a gate",
    shape(4, 4, dtype=BF16),
    shape(4, 4, dtype=E4M3),
    forward_only=True,
)
def _weights_that_are_stored_in_float8_after_a_gate(x, w):
    gate = (x @ w.astype(BF16)) * jax.nn.sigmoid(x)
    return gate @ w.astype(BF16)


near_miss(
    "codes of both sides of which one goes through a function",
    shape(4, 4, dtype=I8),
    shape(4, 4, dtype=I8),
    forward_only=True,
)(lambda x, w: jax.nn.silu(x.astype(BF16)) @ w.astype(BF16))
near_miss("a dot of integers beside one of float32", shape(4, 4, dtype=jnp.int32), X)(
    lambda i, x: (i @ i, x @ x)
)


@with_a_matmul("a round trip through 8 bits that is scaled", X, forward_only=True)
def _a_round_trip_through_8_bits_that_is_scaled(x):
    narrow, scale = codes(x, E4M3)
    return jnp.tanh(narrow.astype(F32) * scale)
