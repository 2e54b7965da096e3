"""Decoding token by token through the cache, under policies: the full forward, and a cache in
compute_dtype.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import get_policy, use_policy

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (2, 6, 16))
POLICIES = (None, "float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
LINEN_LAYERS = ("MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention")
Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]


class LinenBlock(linen.Module):
    layer: str = "MultiHeadDotProductAttention"
    decode: bool = False

    @flax_linen.compact
    def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
        layer: Any = getattr(linen, self.layer)(num_heads=2, qkv_features=8, decode=self.decode)
        return layer(x, mask=mask)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs):
        self.attention: Any = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, qkv_features=8, decode=False, rngs=rngs
        )

    def __call__(self, x: jax.Array, mask: Any = None, *, decode: bool = False) -> jax.Array:
        return self.attention(x, mask=mask, decode=decode)


def built(layer: str) -> tuple[jax.Array, Any, Step]:
    """Returns the full forward, a cache, and a step of a decode loop."""
    mask = linen.make_causal_mask(X[..., 0])
    if layer == "nnx":
        model = NnxBlock(nnx.Rngs(0))
        full = model(X, mask)
        model.attention.init_cache(X.shape)
        graph, cache = flax_nnx.split(model)

        def nnx_step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            copy = flax_nnx.merge(graph, cache, copy=True)
            y = copy(token, decode=True)
            return flax_nnx.state(copy), y

        return full, cache, nnx_step
    variables: Any = LinenBlock(layer, decode=True).init(KEY, X)
    params = {"params": variables["params"]}

    def linen_step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        y, updates = LinenBlock(layer, decode=True).apply(
            params | {"cache": cache}, token, mutable=["cache"]
        )
        return updates["cache"], y

    full: Any = LinenBlock(layer).apply(params, X, mask)
    return full, variables["cache"], linen_step


def cached(cache: Any) -> set[Any]:
    """The dtypes of the keys and values."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {x.dtype for path, x in leaves if "cached_" in jax.tree_util.keystr(path)}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [*LINEN_LAYERS, "nnx"])
def test_a_decode_loop_is_the_full_forward_and_scans(layer, policy):
    with use_policy(policy):
        full, cache, step = built(layer)
        after, outputs = jax.lax.scan(step, cache, X.swapaxes(0, 1)[:, :, None])
    y, resolved = outputs[:, :, 0].swapaxes(0, 1), get_policy(policy or "float32")
    assert y.dtype == full.dtype == resolved.output_dtype
    assert cached(cache) == cached(after) == {resolved.compute_dtype}
    tolerance = 8 * float(jnp.finfo(resolved.compute_dtype).eps)
    np.testing.assert_allclose(y.astype("float32"), full.astype("float32"), atol=tolerance)


@pytest.mark.slow
def test_a_cache_of_another_dtype_is_obeyed():
    with use_policy("mixed_float16"):
        model = NnxBlock(nnx.Rngs(0))
    model.attention.init_cache(X.shape, jnp.bfloat16)
    assert model.attention.cached_key[...].dtype == jnp.bfloat16
