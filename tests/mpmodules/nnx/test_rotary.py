# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
"""Rotary position embedding: angles in float32, the result in the input's dtype. Older versions of
Flax lack it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import Policy, use_policy

if not hasattr(flax_nnx, "RoPE"):
    pytest.skip("this Flax has no RoPE", allow_module_level=True)

HALVES = (jnp.bfloat16, jnp.float16)
Q = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))  # (batch, length, heads, width)


def rotated(x, positions):
    """The truth in float64: x (length, width)."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.filterwarnings("ignore:.*value.*:DeprecationWarning")
@pytest.mark.parametrize("tables", ({}, {"embedding_size": 8, "max_seq_len": 16}))
def test_float32_without_a_policy_is_upstreams_bit_for_bit(tables):
    ours, upstream = nnx.RoPE(**tables), flax_nnx.RoPE(**tables)
    x = Q[:, :, 0]
    np.testing.assert_array_equal(ours(x), upstream(x))
    np.testing.assert_array_equal(ours(x, jnp.arange(6.0) + 3), upstream(x, jnp.arange(6.0) + 3))
    np.testing.assert_array_equal(
        nnx.dot_product_attention_with_rope(Q, Q, Q, rope=ours),
        flax_nnx.dot_product_attention_with_rope(Q, Q, Q, rope=upstream),
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("policy", (None, "mixed"))
def test_half_is_rounded_once(dtype, policy):
    x = jax.random.normal(jax.random.key(1), (6, 8)).astype(dtype)
    positions = jnp.arange(6, dtype=jnp.int32) + 1001  # bfloat16 counts by 8 there
    with use_policy(None if policy is None else Policy("f32", dtype, "f32")):
        rope: Any = nnx.RoPE(embedding_size=8, max_seq_len=2000)
    y = rope(x, positions)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float64),
        rotated(x, positions),
        rtol=0.51 * float(jnp.finfo(dtype).eps),
        atol=2e-4,
    )
    assert rope.cached_sin[...].dtype == jnp.float32
    assert jax.grad(lambda x: jnp.sum(rope(x).astype(jnp.float32)))(x).dtype == dtype


def test_a_boundary_leaves_positions_alone():
    rope = nnx.RoPE(dtype_policy="mixed_bfloat16")
    x, positions = Q[0, :, 0], jnp.arange(6.0) + 1001
    y = rope(x, positions)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(
        y, rotated(x, positions), atol=1e-3
    )  # nothing was rounded on the way in or out


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_with_rope_keeps_dtype_and_accuracy(dtype):
    half = Q.astype(dtype)
    rope = nnx.RoPE(embedding_size=8, max_seq_len=16)
    y = jax.jit(lambda q: nnx.dot_product_attention_with_rope(q, q, q, rope=rope))(half)
    expected = nnx.dot_product_attention_with_rope(*(half.astype(jnp.float32),) * 3, rope=rope)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float32), expected, atol=4 * float(jnp.finfo(dtype).eps)
    )


def test_multi_head_attention_takes_it():
    rope = nnx.RoPE(embedding_size=8, max_seq_len=16)
    with use_policy("mixed_bfloat16"):
        layer = nnx.MultiHeadAttention(
            num_heads=4, in_features=32, rngs=flax_nnx.Rngs(0), decode=False,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
        )  # fmt: skip
    x = jax.random.normal(jax.random.key(2), (2, 6, 32))
    y = layer(x, input_positions=jnp.broadcast_to(jnp.arange(6), (2, 6)))
    assert y.dtype == jnp.float32 and bool(jnp.isfinite(y).all())
    np.testing.assert_allclose(y, layer(x), atol=1e-6)
    positions = jnp.stack([jnp.arange(6), jnp.arange(6) + 5])  # each token's own
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    y = attend(Q, Q, Q, input_positions=positions)
    alone = attend(Q[1:], Q[1:], Q[1:], input_positions=positions[1])
    np.testing.assert_allclose(y[1], alone[0], atol=1e-6)
