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
from policy import use_policy
from policy.testing import assert_close_in_ulps
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


def assert_close(values: Any, exact: Any, dtype: Any) -> None:
    """Within one unit of `dtype`'s last place at the exact value, or at 1/2 where that is smaller.

    A normalised output is of the order of one; next to zero, float32's own last place at 1000 is
    what limits it.
    """
    assert_close_in_ulps(values, exact, 1, dtype, floor=0.5)


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


# --- norms: statistics ----------------------------------------------------------------------------


def offset_rows(offset: float = 1000.0) -> np.ndarray:
    return np.asarray(offset + np.random.default_rng(0).normal(size=(64, 256)), np.float32)


def exact_norm(name: str, x: Any) -> np.ndarray:
    """Returns the result of a fresh layer, in float64."""
    x = np.asarray(x, np.float64)
    if name == "RMSNorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    axis, epsilon = (0, 1e-5) if name == "BatchNorm" else (-1, 1e-6)
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


def normalise(nn: Any, name: str, x: Any, policy: Any = None, **kwargs: Any) -> jax.Array:
    layer = getattr(nn, name)(**NORMS[name], **kwargs)
    with use_policy(policy):
        variables = layer.init(KEY, x)
        return jax.jit(lambda v, x: layer.apply(v, x, mutable=["batch_stats"])[0])(variables, x)


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "BatchNorm"])
def test_upstreams_one_pass_variance_cancels(name):
    x = offset_rows()
    error = np.abs(np.asarray(normalise(flax_nn, name, x)) - exact_norm(name, x)).max()
    repaired(error < 1e-2)
    assert error > 0.1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
def test_our_norms_are_within_one_ulp_of_the_output_dtype_at_a_large_offset(name, half):
    x = offset_rows()
    out = normalise(our_nn, name, x, f"p=f32,c={half},o={half}")
    assert out.dtype == half
    assert_close(out, exact_norm(name, x), half)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
def test_our_norms_are_within_one_ulp_of_a_half_input(name, half):
    """The input is half already: what it holds is exact, and the statistics must not lose more of
    it.
    """
    x = jnp.asarray(offset_rows(100.0), half)
    out = normalise(our_nn, name, x, half)
    assert out.dtype == half
    assert_close(out, exact_norm(name, x), half)


def test_the_float32_preset_repairs_the_variance_too():
    x = offset_rows()
    for name in ("LayerNorm", "GroupNorm", "BatchNorm"):
        error = np.abs(
            np.asarray(normalise(our_nn, name, x, "float32")) - exact_norm(name, x)
        ).max()
        assert error < 3e-4, name


def test_a_fast_variance_given_by_the_user_is_obeyed():
    x = offset_rows()
    for name in ("LayerNorm", "GroupNorm", "BatchNorm"):
        ours = normalise(our_nn, name, x, "float32", use_fast_variance=True)
        np.testing.assert_array_equal(ours, normalise(flax_nn, name, x, use_fast_variance=True))
        slow = normalise(our_nn, name, x, use_fast_variance=False)
        np.testing.assert_array_equal(slow, normalise(flax_nn, name, x, use_fast_variance=False))


@pytest.mark.parametrize("name", NORMS)
def test_the_gradients_of_norms_at_a_large_offset_are_accurate(name):
    x, weights = offset_rows()[:16, :32], np.random.default_rng(1).normal(size=(16, 32))

    def exact(x):  # central differences in float64
        def loss(x):
            return (exact_norm(name, x) * weights).sum()

        step = 1e-4
        out = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            shift = np.zeros_like(x)
            shift[index] = step
            out[index] = (loss(x + shift) - loss(x - shift)) / (2 * step)
        return out

    layer = getattr(our_nn, name)(**NORMS[name])
    with use_policy("float32"):
        variables = layer.init(KEY, x)

        def loss(x):
            return (
                layer.apply(variables, x, mutable=["batch_stats"])[0]
                * jnp.asarray(weights, jnp.float32)
            ).sum()

        gradient = jax.jit(jax.grad(loss))(x)
    truth = exact(np.asarray(x, np.float64))
    np.testing.assert_allclose(gradient, truth, atol=5e-4 * np.abs(truth).max())


def test_a_scale_that_half_cannot_hold_has_its_effect():
    """1.003 rounds to 1 in bfloat16: the scale is read in float32, and the product rounded once."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32)
    layer = our_nn.LayerNorm()
    with use_policy("mixed_bfloat16"):
        variables = layer.init(KEY, x)
        scaled = jax.tree.map(lambda p: p * 1.003, variables)
        plain, changed = apply(layer, variables, x), apply(layer, scaled, x)
    assert float((plain != changed).mean()) > 0.1


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_float16_with_a_large_variance_is_exact(training):
    x = np.asarray(300 * np.random.default_rng(0).normal(size=(256, 4)), np.float16)
    layer = our_nn.BatchNorm(use_running_average=not training)
    with use_policy("mixed_float16"):
        variables = layer.init(KEY, x)
        statistics = {"mean": jnp.zeros(4), "var": jnp.full(4, 1e5)}
        variables = {**variables, "batch_stats": statistics}
        out, updated = apply(layer, variables, x, mutable=["batch_stats"])
    exact = (
        exact_norm("BatchNorm", x) if training else np.asarray(x, np.float64) / np.sqrt(1e5 + 1e-5)
    )
    assert_close(out, exact, np.float16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updated)} == {"float32"}
    if training:
        expected = 0.99 * 1e5 + 0.01 * np.asarray(x, np.float64).var(0)
        np.testing.assert_allclose(updated["batch_stats"]["var"], expected, rtol=1e-5)


def test_masked_and_distributed_norms_take_two_passes_and_stay_accurate():
    x = offset_rows()
    mask = jnp.arange(256)[None] < 128
    with use_policy("float32"):
        layer = our_nn.LayerNorm()
        variables = layer.init(KEY, x)
        out = apply(layer, variables, x, mask=mask)
        mapped = our_nn.LayerNorm(axis_name="batch", use_scale=False, use_bias=False)
        halves = jnp.asarray(x).reshape(64, 2, 128).swapaxes(0, 1)
        over_axis = jax.vmap(lambda x: mapped.apply({}, x), axis_name="batch")(halves)
    kept = np.asarray(x, np.float64)[:, :128]
    truth = (np.asarray(x, np.float64) - kept.mean(-1, keepdims=True)) / np.sqrt(
        kept.var(-1, keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(out, truth, atol=1e-3)
    joined = np.asarray(over_axis).swapaxes(0, 1).reshape(64, 256)
    np.testing.assert_allclose(joined, exact_norm("LayerNorm", x), atol=1e-3)


# --- output dtypes, strict promotion, unset dtypes ------------------------------------------------


def test_upstreams_layers_return_float32_from_half_inputs():
    x = jnp.ones((2, 4), jnp.bfloat16)
    with standard_promotion:
        out = jax.eval_shape(lambda: flax_nn.Dense(3).init_with_output(KEY, x)[0])
    repaired(out.dtype == jnp.bfloat16)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("name", NORMS)
def test_upstreams_norms_in_half_raise_under_strict_promotion(name):
    layer = getattr(flax_nn, name)(**NORMS[name], dtype=jnp.bfloat16)
    try:
        jax.eval_shape(lambda: layer.init(KEY, jnp.ones((2, 4), jnp.bfloat16)))
    except jax.dtypes.TypePromotionError:
        return
    pytest.skip("this Flax repairs it")


@pytest.mark.parametrize("name", ["Dense", "Embed", "BatchNorm", "MultiHeadDotProductAttention"])
def test_both_dtypes_are_detectable_as_unset(name):
    fields = getattr(our_nn, name).__dataclass_fields__
    assert fields["dtype"].default is None and fields["param_dtype"].default is None
