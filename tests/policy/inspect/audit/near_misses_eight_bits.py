"""Programs in 8 bits with nothing wrong in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.policy.inspect.audit.eight_bit_faults import E4M3, E5M2, I8, codes, dot
from tests.policy.inspect.audit.near_misses import BF16, F32, near_miss, shape

X = shape(4, 4)


def _with_scales(dtype: Any, result: Any) -> Any:
    def fn(x: Any, w: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(w, dtype)
        return dot(left, right, result).astype(F32) * s * t

    return fn


def _by_rows_of_what_another_device_holds_too(x: Any) -> Any:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True) / 448, 1e-12)
    return (x / jnp.where(scale > 0, scale, 1)).astype(E4M3)


def _by_blocks(x: Any) -> Any:
    blocks = x.reshape(2, 2, 4)
    largest = jnp.max(jnp.abs(blocks), (1, 2), keepdims=True)
    return jnp.round(blocks / largest * 127).astype(I8).reshape(4, 4)


def _with_noise(x: Any, noise: Any) -> Any:
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.clip(jnp.floor(x / scale + noise), -127, 127).astype(I8)


def _there_and_back(x: Any) -> Any:
    narrow, scale = codes(x, E4M3)
    return jnp.tanh(narrow.astype(F32) * scale)


_PROGRAMS: dict[str, Any] = {
    "a dot of float8 by scales of its operands": _with_scales(E4M3, F32),
    "a dot of float8 that returns bfloat16": _with_scales(E4M3, BF16),
    "a dot of int8 by scales of its operands": _with_scales(I8, jnp.int32),
    "a scale by rows": _by_rows_of_what_another_device_holds_too,
    "a reciprocal that is multiplied": lambda x: (
        x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)
    ).astype(E4M3),
    "a scale that a norm gives": lambda x: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2),
    "blocks that have a scale each": _by_blocks,
    "a stored scale and a clip": lambda x, s: jnp.clip(x / s[0, 0], -448, 448).astype(E4M3),
    "noise before the rounding": _with_noise,
    "a sign": lambda x: jnp.sign(x).astype(I8),
    "a multiple of a sigmoid": lambda x: (jax.nn.sigmoid(x) * 100).astype(E4M3),
    "a bounded function": lambda x: jnp.tanh(x).astype(I8),
    "probabilities in 8 bits": lambda x: jax.nn.softmax(x).astype(E4M3),
    "flags and small integers": lambda x: ((x > 0).astype(I8), jnp.full((4,), 3.0).astype(I8)),
    "labels": lambda x: jnp.argmax(x, -1).astype(I8),
    "buckets that are only compared": lambda x: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0),
    "a round trip through 8 bits that is scaled": _there_and_back,
}


def _beside_a_matmul(fn: Any) -> Any:
    return lambda *given: (fn(*given), jnp.ones((4, 4)) @ jnp.ones((4, 4)))


for _name, _fn in _PROGRAMS.items():
    _args = (X,) * _fn.__code__.co_argcount
    _whole = _fn if _name.startswith("a dot") else _beside_a_matmul(_fn)
    near_miss(_name, *_args, forward_only=not _name.startswith("buckets"))(_whole)


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
