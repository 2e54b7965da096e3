"""Upstream's measured defects in half precision, and what ours give in their place, forward and
backward.

A fact comes twice: upstream's figure (skipped where a newer Flax repairs it), then ours.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import use_policy
from tests.mpmodules.apis import BOTH
from tests.programs import apply, named, operations

KEY = jax.random.key(0)
HALVES = ("bfloat16", "float16")


def repaired(upstream_is_right: Any) -> None:
    if upstream_is_right:
        pytest.skip("this Flax repairs it")


def standard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs what upstream can't run under strict promotion."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return run


SEEN = 4097


def embedding(layers: Any, policy: Any = None, **options: Any) -> tuple[Any, Any]:
    """Returns the sum of a token's rows as a function of the table, and the table."""
    tokens = jnp.zeros(SEEN, int)
    with use_policy(policy):
        if layers in (linen, flax.linen):
            layer = layers.Embed(2, 1, **options)
            run, params = layer.apply, layer.init(KEY, tokens)
        else:
            layer = layers.Embed(2, 1, rngs=flax.nnx.Rngs(0), **options)
            graph, params = flax.nnx.split(layer)
            run = lambda params, x: flax.nnx.merge(graph, params, copy=True)(x)  # noqa: E731

    def total(params: Any) -> jax.Array:
        with use_policy(policy):
            return run(params, tokens).astype(jnp.float32).sum()

    return total, params


def embedding_gradient(*args: Any, **options: Any) -> jax.Array:
    total, params = embedding(*args, **options)
    (gradient,) = jax.tree.leaves(jax.jit(jax.grad(total))(params))
    assert float(gradient[1, 0]) == 0
    return gradient[0, 0]


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize(("half", "figure"), [("bfloat16", 256), ("float16", 2048)])
def test_upstreams_embedding_gradient_stops_growing(api, half, figure):
    found = float(embedding_gradient(api.flax, dtype=jnp.dtype(half)))
    repaired(found == SEEN)
    assert found == figure


@pytest.mark.cases(fast=1, slow=2)
@BOTH
@pytest.mark.parametrize("half", HALVES)
def test_our_embedding_gradient_counts_every_occurrence(api, half):
    mixed = f"p=f32,c={half},o=f32"
    for scope, options in (
        (mixed, {}),
        (mixed, {"dtype_policy": mixed}),
        (f"p=f32,c={half},o={half}", {}),
        (half, {}),
        (None, {"dtype": jnp.dtype(half)}),  # threaded by hand
    ):
        found = embedding_gradient(api.module, scope, **options)
        stored = jnp.dtype(half if scope == half else "float32")
        assert (found, found.dtype) == (jnp.asarray(SEEN, stored), stored)  # rounded once


@pytest.mark.cases(fast=1)
@BOTH
def test_the_lookup_reads_the_stored_table_and_casts_what_it_found(api):
    total, params = embedding(api.module, "mixed_bfloat16")
    (gather,) = named(operations(total, params), "gather")
    assert gather.outputs == ("float32",)
    sums = named(operations(jax.grad(total), params), "scatter-add", "scatter_add")
    assert [op.outputs for op in sums] == [("float32",)]


RANDOM = np.random.default_rng(0)
QUERY = 3 * RANDOM.normal(size=(1, 64, 4, 64))
KEYS, VALUES = (RANDOM.normal(size=(1, 512, 4, 64)) for _ in range(2))
MASK = RANDOM.uniform(size=(1, 1, 64, 512)) < 0.5
BIAS = RANDOM.normal(size=(1, 4, 64, 512))
CAUSAL = np.tril(np.ones((1, 1, 64, 512), bool))
DIAGONAL = MASK | np.eye(64, 512, dtype=bool)
# Every path through attention: its options, and what float64 is told of them.
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "dropout rate, deterministic": ({"dropout_rate": 0.1, "deterministic": True}, {}),
    "precision": ({"precision": "highest"}, {}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
    "bias": ({"bias": jnp.asarray(BIAS, "bfloat16")}, {"bias": BIAS}),
    "causal": ({"is_causal": True}, {"mask": CAUSAL}),
    "causal and mask": ({"is_causal": True, "mask": DIAGONAL}, {"mask": CAUSAL & DIAGONAL}),
    "grouped queries": ({}, {}),
}


def exact_attention(query: Any, key: Any, value: Any, mask: Any = None, bias: Any = 0) -> Any:
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[-2] // key.shape[-2], -2) for x in (key, value))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1]) + bias
    logits = logits if mask is None else np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


def attention_error(attend: Any, path: str, half: Any = "bfloat16", **options: Any) -> float:
    given, told = PATHS[path]
    told = {name: np.asarray(jnp.asarray(x, half), np.float64) if name == "bias" else x
            for name, x in told.items()}  # fmt: skip
    heads = 2 if path == "grouped queries" else 4
    arrays = [jnp.asarray(x, half) for x in (QUERY, KEYS[:, :, :heads], VALUES[:, :, :heads])]
    # not jitted: XLA:CPU may keep more digits of a fused half than it was asked to
    out = attend(*arrays, **given, **options)
    assert out.dtype == half or options  # forced, Flax returns float32
    return np.abs(np.asarray(out, np.float64) - exact_attention(*arrays, **told)).max()


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("forced", [False, True])
def test_upstreams_attention_rounds_its_softmax(api, forced):
    if forced and api.name == "nnx":
        pytest.skip("linen's alone")
    options = {"force_fp32_for_softmax": True} if forced else {}
    attend = standard(api.flax.dot_product_attention)
    error = attention_error(attend, "dropout rate, deterministic", **options)
    repaired(error < 0.013)
    assert error > 0.02


@pytest.mark.cases(fast=1, slow=13)
@BOTH
@pytest.mark.parametrize("path", PATHS)
def test_our_attention_keeps_a_float32_softmax_on_every_path(api, path):
    if api.name == "linen" and "causal" in path:
        pytest.skip("nnx's alone")
    assert attention_error(api.module.dot_product_attention, path) < 0.0125


@pytest.mark.cases(fast=1)
@BOTH
def test_our_attention_in_float16_under_jit_is_accurate(api):
    attend = jax.jit(api.module.dot_product_attention)
    assert attention_error(attend, "plain", "float16") < 0.003


@pytest.mark.cases(fast=1)
@BOTH
def test_sown_attention_weights_come_from_the_float32_softmax(api):
    x = jax.random.normal(KEY, (1, 4, 4))
    with use_policy("mixed_bfloat16"):
        if api.name == "linen":
            layer = linen.MultiHeadDotProductAttention(2)
            variables = layer.init(KEY, x)
            _, state = apply(layer, variables, x, sow_weights=True, mutable=["intermediates"])
            (weights,) = state["intermediates"]["attention_weights"]
        else:
            layer = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
            sows = lambda layer, x: layer(x, sow_weights=True)  # noqa: E731
            _, state = flax.nnx.capture(sows, flax.nnx.Intermediate)(layer, x)
            (weights,) = state["attention_weights"].get_value()
    assert weights.shape == (1, 2, 4, 4) and weights.dtype == jnp.bfloat16
    np.testing.assert_allclose(weights.astype(jnp.float32).sum(-1), 1, atol=2**-7)


def test_dropout_masks_of_attention_weights_are_upstreams():
    q, k = (jnp.asarray(x[:, :8], jnp.float32) for x in (QUERY, KEYS))
    options = {"dropout_rng": jax.random.key(3), "dropout_rate": 0.5}
    for broadcast in (True, False):
        options["broadcast_dropout"] = broadcast
        wide = flax.linen.dot_product_attention_weights(q, k, **options)
        half = (x.astype(jnp.bfloat16) for x in (q, k))
        half = linen.dot_product_attention_weights(*half, **options)
        np.testing.assert_array_equal(half == 0, wide == 0)
