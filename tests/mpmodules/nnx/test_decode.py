"""Decoding token by token through the cache, under policies: the full forward, and a cache in
compute_dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import get_policy, use_policy

X = jax.random.normal(jax.random.key(1), (2, 6, 16))
POLICIES = (None, "float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention: Any = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, qkv_features=8, decode=False, rngs=rngs
        )

    def __call__(self, x, mask=None, *, decode=False):
        return self.attention(x, mask=mask, decode=decode)


def decoded(model, x=X):
    @nnx.jit
    def step(model, token):
        return model(token, decode=True)

    return jnp.concatenate([step(model, x[:, t : t + 1]) for t in range(x.shape[1])], 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_loop_is_the_full_forward(policy):
    with use_policy(policy):
        model = Block(nnx.Rngs(0))
    full = model(X, nnx.make_causal_mask(X[..., 0]))
    model.attention.init_cache(X.shape)
    y = decoded(model)
    resolved = get_policy(policy or "float32")
    assert y.dtype == full.dtype == resolved.output_dtype
    assert (
        model.attention.cached_key[...].dtype
        == model.attention.cached_value[...].dtype
        == resolved.compute_dtype
    )
    tolerance = 8 * float(jnp.finfo(resolved.compute_dtype).eps)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(full, np.float32), atol=tolerance
    )


def test_upstreams_first_bfloat16_decode_step_raises():
    layer = flax_nnx.MultiHeadAttention(
        num_heads=2, in_features=16, dtype=jnp.bfloat16, decode=True, rngs=flax_nnx.Rngs(0)
    )
    layer.init_cache((2, 6, 16))
    try:
        with jax.numpy_dtype_promotion("standard"):
            layer(X[:, :1])
    except (TypeError, ValueError):
        return
    pytest.skip("this Flax decodes in bfloat16")


def test_a_cache_of_another_dtype_is_obeyed():
    with use_policy("mixed_bfloat16"):
        model = Block(nnx.Rngs(0))
    model.attention.init_cache(X.shape, jnp.bfloat16)
    assert model.attention.cached_key[...].dtype == jnp.bfloat16


def test_a_policy_applied_to_flaxs_own_attention_decodes():
    theirs: Any = flax_nnx.MultiHeadAttention(
        num_heads=2, in_features=16, decode=True, rngs=flax_nnx.Rngs(0)
    )
    ported = nnx.apply_policy(theirs, "mixed_bfloat16")
    ported.init_cache(X.shape)
    assert ported.cached_key[...].dtype == jnp.bfloat16
    y = ported(X[:, :1])
    assert y.dtype == jnp.float32 and ported.cached_key[...].dtype == jnp.bfloat16
