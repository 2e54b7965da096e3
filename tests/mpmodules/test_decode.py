"""Decoding token by token through the cache, under policies: the full forward, and a cache in
compute_dtype.
"""

from __future__ import annotations

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import get_policy, use_policy

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 6, 16))
POLICIES = (None, "float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "c=f16")
LAYERS = (
    "linen.MultiHeadDotProductAttention",
    "linen.MultiHeadAttention",
    "linen.SelfAttention",
    "nnx.MultiHeadAttention",
)


class Block(linen.Module):
    layer: str = "MultiHeadDotProductAttention"
    decode: bool = False

    @linen.compact
    def __call__(self, x, mask=None):
        layer: Any = getattr(linen, self.layer)(num_heads=2, qkv_features=8, decode=self.decode)
        return layer(x, mask=mask)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention: Any = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, qkv_features=8, decode=False, rngs=rngs
        )

    def __call__(self, x, mask=None, *, decode=False):
        return self.attention(x, mask=mask, decode=decode)


def linen_run(layer: str) -> tuple[Any, Any, Any, Any]:
    """Returns the full forward, the outputs of a decode loop, and the cache before and after it."""
    variables: Any = Block(layer, decode=True).init(KEY, X)
    params, cache = {"params": variables["params"]}, variables["cache"]
    full = Block(layer).apply(params, X, linen.make_causal_mask(X[..., 0]))

    @jax.jit
    def step(cache, token):
        model: Any = Block(layer, decode=True)
        y, updates = model.apply({**params, "cache": cache}, token, mutable=["cache"])
        return updates["cache"], y

    outputs = []
    for t in range(X.shape[1]):
        cache, y = step(cache, X[:, t : t + 1])
        outputs.append(y)
    return full, jnp.concatenate(outputs, 1), variables["cache"], cache


def nnx_run(layer: str) -> tuple[Any, Any, Any, Any]:
    """As `linen_run`."""
    model = NnxBlock(nnx.Rngs(0))
    full = model(X, nnx.make_causal_mask(X[..., 0]))
    model.attention.init_cache(X.shape)
    before = jax.tree.map(lambda leaf: leaf, nnx.state(model, nnx.Cache))
    step = nnx.jit(lambda model, token: model(token, decode=True))
    outputs = [step(model, X[:, t : t + 1]) for t in range(X.shape[1])]
    return full, jnp.concatenate(outputs, 1), before, nnx.state(model, nnx.Cache)


@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_decode_loop_is_the_full_forward(layer, policy):
    wing, _, name = layer.partition(".")
    with use_policy(policy):
        full, y, before, after = (linen_run if wing == "linen" else nnx_run)(name)
    resolved = get_policy(policy or "float32")
    assert y.dtype == full.dtype == resolved.output_dtype
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(cache)] for cache in (before, after)]
    assert dtypes[0] == dtypes[1]
    floating = {dtype for dtype in dtypes[1] if jnp.issubdtype(dtype, jnp.floating)}
    assert floating == {resolved.compute_dtype}
    found, expected = np.asarray(y, np.float32), np.asarray(full, np.float32)
    atol = 8 * float(jnp.finfo(resolved.compute_dtype).eps)
    np.testing.assert_allclose(found, expected, atol=atol)


def test_the_loop_scans():
    with use_policy("mixed_bfloat16"):
        variables: Any = Block(decode=True).init(KEY, X)

        def step(cache, token):
            y, updates = Block(decode=True).apply(
                {"params": variables["params"], "cache": cache}, token[:, None], mutable=["cache"]
            )
            return updates["cache"], y

        _, scanned = jax.lax.scan(step, variables["cache"], X.swapaxes(0, 1))
        _, y, _, _ = linen_run("MultiHeadDotProductAttention")
    np.testing.assert_allclose(scanned[:, :, 0].swapaxes(0, 1), y, atol=2e-2)


def test_upstreams_first_bfloat16_decode_step_raises():
    layer = flax.nnx.MultiHeadAttention(
        num_heads=2, in_features=16, dtype=jnp.bfloat16, decode=True, rngs=flax.nnx.Rngs(0)
    )
    layer.init_cache((2, 6, 16))
    try:
        with jax.numpy_dtype_promotion("standard"):
            layer(X[:, :1])
    except (TypeError, ValueError):
        return
    pytest.skip("this Flax decodes in bfloat16")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_cache_of_another_dtype_is_obeyed(dtype):
    with use_policy("mixed_bfloat16"):
        model = NnxBlock(nnx.Rngs(0))
    model.attention.init_cache(X.shape, dtype)
    assert model.attention.cached_key[...].dtype == dtype


def test_a_policy_applied_to_flaxs_own_attention_decodes():
    theirs = flax.linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, decode=True)
    ported = linen.apply_policy(theirs, "mixed_bfloat16")
    variables: Any = ported.init(KEY, X)
    assert variables["cache"]["cached_key"].dtype == jnp.bfloat16
    applied: Any = ported.apply(variables, X[:, :1], mutable=["cache"])
    y, updates = applied
    assert y.dtype == jnp.float32 and updates["cache"]["cached_key"].dtype == jnp.bfloat16

    plain: Any = flax.nnx.MultiHeadAttention(2, 16, decode=True, rngs=flax.nnx.Rngs(0))
    model: Any = nnx.apply_policy(plain, "mixed_bfloat16")
    model.init_cache(X.shape)
    y = model(X[:, :1])
    assert y.dtype == jnp.float32 and model.cached_key[...].dtype == jnp.bfloat16
