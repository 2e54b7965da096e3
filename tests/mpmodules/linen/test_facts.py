"""Upstream's measured defects in half precision, and what ours give in their place, forward and
backward.

Each fact comes twice: upstream's figure (skipped where a newer Flax repairs it), then ours.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import get_policy, use_policy
from tests.programs import apply, named, operations

KEY = jax.random.key(0)
HALVES = ("bfloat16", "float16")
NORMS = {
    "LayerNorm": {},
    "RMSNorm": {},
    "GroupNorm": {"num_groups": 1},
    "BatchNorm": {"use_running_average": False},
}
standard_promotion = jax.numpy_dtype_promotion("standard")


def repaired(upstream_is_right: bool) -> None:
    if upstream_is_right:
        pytest.skip("this Flax repairs it")


# --- Embed: the gradient of a token that is seen often --------------------------------------------

SEEN = 4096


def embedding_gradient(nn: Any, policy: Any = None, **kwargs: Any) -> jax.Array:
    layer = nn.Embed(2, 1, **kwargs)
    tokens = jnp.zeros(SEEN, int)
    with use_policy(policy):
        variables = layer.init(KEY, tokens)

        def loss(variables):
            return layer.apply(variables, tokens).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss))(variables)["params"]["embedding"][0, 0]


@pytest.mark.parametrize(("half", "figure"), [("bfloat16", 256), ("float16", 2048)])
def test_upstreams_embedding_gradient_stops_growing(half, figure):
    found = float(embedding_gradient(flax_nn, dtype=jnp.dtype(half)))
    repaired(found == SEEN)
    assert found == figure


@pytest.mark.parametrize("half", HALVES)
def test_our_embedding_gradient_counts_every_occurrence(half):
    policy = f"p=f32,c={half},o=f32"
    for scope, options in (
        (policy, {}),
        (policy, {"dtype_policy": policy}),
        (None, {"dtype": jnp.dtype(half)}),  # threaded by hand
    ):
        found = embedding_gradient(our_nn, scope, **options)
        assert (float(found), found.dtype) == (SEEN, jnp.float32)


@pytest.mark.parametrize("half", HALVES)
def test_a_half_table_sums_its_gradient_wide_and_rounds_once(half):
    gradient = embedding_gradient(our_nn, half)
    assert (float(gradient), gradient.dtype) == (SEEN, jnp.dtype(half))


def test_the_lookup_reads_the_stored_table_and_casts_what_it_found():
    layer = our_nn.Embed(100, 4)
    tokens = jnp.zeros(3, int)
    variables = layer.init(KEY, tokens)
    with use_policy("mixed_bfloat16"):
        ops = operations(layer.apply, variables, tokens)
        gradient_ops = operations(
            jax.grad(lambda v: apply(layer, v, tokens).astype(jnp.float32).sum()), variables
        )
    (gather,) = named(ops, "gather")
    assert gather.outputs == ("float32",)
    assert [op.outputs for op in named(gradient_ops, "scatter-add", "scatter_add")] == [
        ("float32",)
    ]


# --- attention: logits and softmax ----------------------------------------------------------------


def attention_inputs(half: Any) -> tuple[jax.Array, ...]:
    """q * 3, 512 keys, width 64."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(1, 128, 2, 64)),
        *(rng.normal(size=(1, 512, 2, 64)) for _ in range(2)),
    )
    return tuple(jnp.asarray(x, half) for x in (3 * q, k, v))


def exact_attention(q: Any, k: Any, v: Any) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def attention_error(attend: Any, half: Any = jnp.bfloat16, **kwargs: Any) -> float:
    arrays = attention_inputs(half)
    out = attend(
        *arrays, **kwargs
    )  # not jitted: XLA:CPU may keep more digits of a fused half than it was asked to
    return float(np.abs(np.asarray(out, np.float64) - exact_attention(*arrays)).max())


def test_upstreams_attention_rounds_logits_and_softmax():
    with standard_promotion:
        default = attention_error(flax_nn.dot_product_attention)
        forced = attention_error(flax_nn.dot_product_attention, force_fp32_for_softmax=True)
    repaired(max(default, forced) < 0.02)
    assert default > 0.025 and forced > 0.02


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_rate": 0.5, "deterministic": True},
        {"precision": "highest"},
        {"mask": np.ones((1, 1, 128, 512), bool)},
        {"bias": np.zeros((1, 1, 128, 512), np.float32)},
    ],
    ids=str,
)
def test_our_attention_accumulates_logits_and_softmax_in_float32(options):
    options = {
        name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()
    }
    assert attention_error(our_nn.dot_product_attention, **options) < 0.015


def test_our_attention_in_float16_under_jit_is_accurate():
    assert attention_error(jax.jit(our_nn.dot_product_attention), jnp.float16) < 0.003


def test_our_attention_backward_is_accurate():
    arrays = attention_inputs(jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)

    def gradients(attend, *arrays):
        def loss(*arrays):
            return (attend(*arrays).astype(jnp.float32) * weights).sum()

        found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
        return [np.asarray(g, np.float64) for g in found]

    exact = gradients(flax_nn.dot_product_attention, *(x.astype(jnp.float32) for x in arrays))
    ours = gradients(our_nn.dot_product_attention, *arrays)
    theirs = gradients(flax_nn.dot_product_attention, *arrays)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        error, upstream = (np.linalg.norm(x - truth) / np.linalg.norm(truth) for x in (a, b))
        assert error < 0.01 and error <= upstream


@pytest.mark.parametrize(
    "name", ["MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention"]
)
@pytest.mark.parametrize(
    "options", [{}, {"dropout_rate": 0.5}, {"normalize_qk": True}, {"decode": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
def test_every_attention_layer_keeps_exp_in_float32_and_matmuls_on_half_operands(name, options):
    layer = getattr(our_nn, name)(2, **options)
    x = jnp.ones((1, 1 if "decode" in options else 4, 4))
    keys = {"params": KEY, "dropout": KEY}
    with use_policy("mixed_bfloat16"):
        kwargs = {"deterministic": not options.get("dropout_rate")}
        variables = jax.eval_shape(lambda: layer.init(keys, x, **kwargs))

        def run(v):
            out, _ = layer.apply(v, x, rngs={"dropout": KEY}, mutable=["cache"], **kwargs)
            return out.astype(jnp.float32).sum()

        forward, both = (
            operations(run, variables),
            operations(jax.grad(run, allow_int=True), variables),
        )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables["params"])} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables.get("cache", {}))} <= {
        "bfloat16",
        "int32",
    }
    for ops in (forward, both):
        dots = named(ops, "dot_general")
        assert all(op.inputs == ("bfloat16", "bfloat16") for op in dots)
        assert {op.outputs for op in named(ops, "exp")} == {("float32",)}
    # of the forward matmuls, the logits come as their accumulator, and what is divided by the
    # softmax's sums
    accumulators = 1 if options.get("dropout_rate") else 2
    assert [op.outputs for op in named(forward, "dot_general")].count(("float32",)) == accumulators


def test_sown_attention_weights_come_from_the_float32_softmax():
    layer = our_nn.MultiHeadDotProductAttention(2)
    x = jax.random.normal(KEY, (1, 4, 4))
    with use_policy("mixed_bfloat16"):
        variables = layer.init(KEY, x)
        _, state = apply(layer, variables, x, sow_weights=True, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    assert weights.shape == (1, 2, 4, 4)
    np.testing.assert_allclose(weights.astype(jnp.float32).sum(-1), 1, atol=2**-7)


def test_dropout_masks_of_attention_weights_are_upstreams():
    q, k = (x[:, :8] for x in attention_inputs(jnp.float32)[:2])
    options = {"dropout_rng": jax.random.key(3), "dropout_rate": 0.5}
    for broadcast in (True, False):
        wide = flax_nn.dot_product_attention_weights(q, k, broadcast_dropout=broadcast, **options)
        half = our_nn.dot_product_attention_weights(
            q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), broadcast_dropout=broadcast, **options
        )
        np.testing.assert_array_equal(half == 0, wide == 0)


def test_a_fully_masked_row_is_uniform_and_no_nan():
    q, k, v = (x[:, :8] for x in attention_inputs(jnp.float16))
    mask = jnp.ones((1, 1, 8, 8), bool).at[..., 3, :].set(False)
    out = our_nn.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(
        out[:, 3].astype(np.float32), v.astype(np.float32).mean(1), atol=2e-3
    )


# --- output dtypes, strict promotion, unset dtypes ------------------------------------------------


def test_upstreams_layers_return_float32_from_half_inputs():
    x = jnp.ones((2, 4), jnp.bfloat16)
    with standard_promotion:
        out = jax.eval_shape(lambda: flax_nn.Dense(3).init_with_output(KEY, x)[0])
    repaired(out.dtype == jnp.bfloat16)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", "mixed_float16", "bf16", "p=f16,c=bf16,o=f32"]
)
def test_our_norms_trace_under_strict_promotion_and_return_what_the_policy_says(policy, given):
    x = jnp.ones((2, 4), given)
    for name, options in NORMS.items():
        layer = getattr(our_nn, name)(**options)
        with use_policy(policy):
            out = jax.eval_shape(lambda layer=layer: layer.init_with_output(KEY, x)[0])
        assert out.dtype == get_policy(policy).compute_dtype


def test_both_dtypes_are_detectable_as_unset():
    for name in (
        "Dense",
        "Conv",
        "Embed",
        "LayerNorm",
        "BatchNorm",
        "MultiHeadDotProductAttention",
    ):
        fields = {
            f: field.default for f, field in getattr(our_nn, name).__dataclass_fields__.items()
        }
        assert fields["dtype"] is None and fields["param_dtype"] is None, name
