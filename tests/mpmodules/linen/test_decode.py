"""Decoding token by token through the cache, under policies: the full forward, and a cache in
compute_dtype.
"""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from policy import get_policy, use_policy

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 6, 16))
POLICIES = (None, "float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
LAYERS = ("MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention")


class Block(nn.Module):
    layer: str = "MultiHeadDotProductAttention"
    decode: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        layer: Any = getattr(nn, self.layer)(num_heads=2, qkv_features=8, decode=self.decode)
        return layer(x, mask=mask)


def decoded(layer, params, cache):
    """The outputs of a decode loop, stacked, and the cache after it."""

    @jax.jit
    def step(cache, token):
        y, updates = Block(layer, decode=True).apply(
            {"params": params, "cache": cache}, token, mutable=["cache"]
        )
        return updates["cache"], y

    outputs = []
    for t in range(X.shape[1]):
        cache, y = step(cache, X[:, t : t + 1])
        outputs.append(y)
    return jnp.concatenate(outputs, 1), cache


@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_decode_loop_is_the_full_forward(layer, policy):
    with use_policy(policy):
        variables: Any = Block(layer, decode=True).init(KEY, X)
        full: Any = Block(layer).apply(
            {"params": variables["params"]}, X, nn.make_causal_mask(X[..., 0])
        )
        y, cache = decoded(layer, variables["params"], variables["cache"])
    resolved = get_policy(policy or "float32")
    assert y.dtype == full.dtype == resolved.output_dtype
    before, after = (
        jax.tree.map(lambda leaf: leaf.dtype.name, tree) for tree in (variables["cache"], cache)
    )
    assert before == after
    floating = {
        leaf.dtype for leaf in jax.tree.leaves(cache) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floating == {resolved.compute_dtype}
    tolerance = 8 * float(jnp.finfo(resolved.compute_dtype).eps)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(full, np.float32), atol=tolerance
    )


def test_the_loop_scans():
    with use_policy("mixed_bfloat16"):
        variables: Any = Block(decode=True).init(KEY, X)

        def step(cache, token):
            y, updates = Block(decode=True).apply(
                {"params": variables["params"], "cache": cache}, token[:, None], mutable=["cache"]
            )
            return updates["cache"], y

        _, scanned = jax.lax.scan(step, variables["cache"], X.swapaxes(0, 1))
        y, _ = decoded("MultiHeadDotProductAttention", variables["params"], variables["cache"])
    np.testing.assert_allclose(scanned[:, :, 0].swapaxes(0, 1), y, atol=2e-2)


def test_a_policy_applied_to_flaxs_own_attention_decodes():
    theirs = flax_nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, decode=True)
    ported = nn.apply_policy(theirs, "mixed_bfloat16")
    variables: Any = ported.init(KEY, X)
    assert variables["cache"]["cached_key"].dtype == jnp.bfloat16
    applied: Any = ported.apply(variables, X[:, :1], mutable=["cache"])
    y, updates = applied
    assert y.dtype == jnp.float32 and updates["cache"]["cached_key"].dtype == jnp.bfloat16
