"""Cached decoding after the port gives what the whole sequence gives, in the policy's dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import use_policy
from tests.porting import models

POLICY = "mixed_bfloat16"
ULP = float(jnp.finfo(jnp.bfloat16).eps)


def decoded(name: str, variables: Any, inputs: Any) -> tuple[Any, Any]:
    """The logits of each position from one call a token, and the cache after the last."""
    module = models.after(name)
    config = module.TransformerConfig(num_layers=1, decode=True)
    model = (module.TransformerLM if name == "lm1b" else module.Transformer)(config)
    tokens = jnp.pad(inputs["tokens"], ((0, 0), (1, 0)))[:, :-1]

    def step(cache: Any, token: Any) -> tuple[Any, Any]:
        collections = variables | {"cache": cache}
        if name == "lm1b":
            logits, changed = model.apply(collections, token[:, None], mutable=["cache"])
        else:
            method = type(model).decode
            args = encoded, inputs["sources"], token[:, None]
            logits, changed = model.apply(collections, *args, mutable=["cache"], method=method)
        return changed["cache"], logits[:, 0]

    with use_policy(POLICY):
        shapes = [tokens.shape] if name == "lm1b" else [inputs["sources"].shape, tokens.shape]
        cache = jax.eval_shape(lambda: module.initialize_cache(jax.random.key(0), config, *shapes))
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
        if name == "wmt":
            encode = type(model).encode
            encoded = jax.jit(lambda: model.apply(variables, inputs["sources"], method=encode))()
            assert encoded.dtype == jnp.float32  # a method called from outside returns output_dtype
        cache, logits = jax.jit(lambda cache: jax.lax.scan(step, cache, tokens.T))(cache)
    return jnp.swapaxes(logits, 0, 1), cache


@pytest.mark.parametrize("name", ["lm1b", "wmt"])
def test_a_token_at_a_time_gives_what_the_whole_sequence_gives(name):
    ported, inputs = models.by_policy(name, POLICY), models.batch(name)
    variables = models.random_tree(jax.eval_shape(ported.init), 0)
    whole = np.asarray(models.compiled(ported.logits, variables, inputs)(variables, inputs))
    logits, cache = decoded(name, variables, inputs)
    assert logits.dtype == jnp.float32
    # without padding, which the cache knows nothing of
    rows, atol = np.asarray(inputs["tokens"]).all(axis=1), 4 * ULP * np.abs(whole).max()
    np.testing.assert_allclose(logits[rows], whole[rows], rtol=0, atol=atol)
    stored = {leaf.dtype for leaf in jax.tree.leaves(cache)}
    floating = {str(dtype) for dtype in stored if jnp.issubdtype(dtype, jnp.floating)}
    assert floating == {"bfloat16"}


def test_a_cache_that_is_handed_through_comes_back_as_it_went_in_and_changes_no_logits():
    module, inputs = models.after("gemma"), models.batch("gemma")
    with use_policy(POLICY):
        config = module.TransformerConfig(num_layers=1)
        model = flax_nnx.eval_shape(lambda: module.Transformer(config, rngs=flax_nnx.Rngs(0)))
    graphdef, state = flax_nnx.split(model)

    def called(state: Any) -> Any:
        model = flax_nnx.merge(graphdef, state)
        cache = model.init_cache(models.LENGTH, models.BATCH)
        plain, _ = models.causal(model, inputs["tokens"])
        return cache, plain, *models.causal(model, inputs["tokens"], cache)

    given, _, logits, returned = jax.eval_shape(called, state)
    assert returned == given  # dtypes too: a loop can carry it
    assert logits.dtype == returned["layer_0"]["k"].dtype == jnp.float32
    state = models.random_tree(state, 0)
    _, plain, cached, _ = models.compiled(called, state)(state)
    np.testing.assert_array_equal(plain, cached)
