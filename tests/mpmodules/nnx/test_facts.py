"""What upstream gets wrong in low precision, first (skipped where a newer Flax repaired it), then
what ours gives.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import Policy, nnx, use_policy
from mpmodules.nnx import dot_product_attention

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
HALVES = [pytest.param(BF16, id="bf16"), pytest.param(F16, id="f16")]


def mixed(half):
    return Policy(F32, half, F32)


def ulp(dtype):
    """The spacing of `dtype` at 1, as a relative tolerance: one ulp of a result of any size."""
    return float(jnp.finfo(dtype).eps)


def relaxed(function, *args, **kwargs):
    """Upstream can't be traced under strict promotion here, so its figures are taken under standard
    promotion.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*args, **kwargs)


def repaired(condition):
    if condition:
        pytest.skip("this release of Flax has repaired it")


# --------------------------------------------------------------------------------------------------
# Embed's gradient is summed over a token's occurrences in float32
# --------------------------------------------------------------------------------------------------

TOKENS = np.zeros((4096,), np.int32)


def embedding_gradient(layer, tokens=TOKENS):
    definition, state = flax_nnx.split(layer)

    def total(state):
        return flax_nnx.merge(definition, state, copy=True)(tokens).astype(F32).sum()

    return jax.tree.leaves(jax.grad(total)(state))[0]


@pytest.mark.parametrize(("half", "figure"), [(BF16, 256), (F16, 2048)], ids=["bf16", "f16"])
def test_flax_s_embedding_gradient_stops_growing(half, figure):
    gradient = embedding_gradient(flax_nnx.Embed(2, 3, dtype=half, rngs=flax_nnx.Rngs(0)))
    repaired(gradient[0, 0] == 4096)
    np.testing.assert_array_equal(gradient[0], figure)


@pytest.mark.parametrize("half", HALVES)
def test_our_embedding_gradient_counts_every_occurrence(half):
    for policy in (mixed(half), Policy(half, half, half), Policy(F32, half, half)):
        layer = nnx.Embed(2, 3, dtype_policy=policy, rngs=nnx.Rngs(0))
        gradient = embedding_gradient(layer)
        assert gradient.dtype == policy.param_dtype
        np.testing.assert_array_equal(gradient[0].astype(F32), 4096)
        np.testing.assert_array_equal(gradient[1].astype(F32), 0)
    explicit = nnx.Embed(2, 3, dtype=half, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(embedding_gradient(explicit)[0], 4096)


# --------------------------------------------------------------------------------------------------
# Attention: float32 logits and softmax on every path
# --------------------------------------------------------------------------------------------------

_random = np.random.default_rng(0)
QUERY = (3 * _random.normal(size=(1, 64, 4, 64))).astype(np.float32)
KEY, VALUE = (_random.normal(size=(1, 512, 4, 64)).astype(np.float32) for _ in range(2))


def attention_in_float64(query, key, value, mask=None, bias=None):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    repeats = query.shape[-2] // key.shape[-2]
    key, value = np.repeat(key, repeats, -2), np.repeat(value, repeats, -2)
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, value)


MASK = np.asarray(_random.uniform(size=(1, 1, 64, 512)) < 0.5)
BIAS = _random.normal(size=(1, 4, 64, 512)).astype(np.float32)
CAUSAL = np.tril(np.ones((1, 1, 64, 512), bool))

# Every path through attention: its options, and what float64 is told of them.
HALF_BIAS = jnp.asarray(BIAS, BF16)
DIAGONAL = MASK | np.eye(64, 512, dtype=bool)
PATHS = {
    "plain": ({}, {}),
    "dropout rate, deterministic": ({"dropout_rate": 0.1, "deterministic": True}, {}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
    "bias": ({"bias": HALF_BIAS}, {"bias": np.asarray(HALF_BIAS, np.float64)}),
    "causal": ({"is_causal": True}, {"mask": CAUSAL}),
    "causal and mask": ({"is_causal": True, "mask": DIAGONAL}, {"mask": CAUSAL & DIAGONAL}),
}


def attention_error(function, options, told, key=KEY, value=VALUE):
    q, k, v = (jnp.asarray(x, BF16) for x in (QUERY, key, value))
    out = function(q, k, v, **options)
    assert out.dtype == BF16
    return np.abs(np.asarray(out, np.float64) - attention_in_float64(q, k, v, **told)).max()


def test_flax_s_attention_with_a_dropout_rate_rounds_its_softmax():
    error = relaxed(
        attention_error, flax_nnx.dot_product_attention, *PATHS["dropout rate, deterministic"]
    )
    repaired(error < 0.013)
    assert error > 0.02


@pytest.mark.parametrize("path", [*PATHS, "grouped queries"])
def test_our_attention_keeps_a_float32_softmax_on_every_path(path):
    heads = 2 if path == "grouped queries" else 4
    options = PATHS.get(path, PATHS["plain"])
    error = attention_error(dot_product_attention, *options, KEY[:, :, :heads], VALUE[:, :, :heads])
    assert error < 0.0125


def test_our_attention_keeps_a_float32_softmax_when_weights_are_sown():
    class Holder(nnx.Module):
        def __call__(self, q, k, v):
            return dot_product_attention(q, k, v, module=self)

    forward = flax_nnx.capture(Holder(), flax_nnx.Intermediate)
    sown = []

    def function(q, k, v):
        out, state = forward(q, k, v)
        sown.append(state["attention_weights"].get_value()[0])
        return out

    assert attention_error(function, {}, {}) < 0.0125
    assert (sown[0].shape, sown[0].dtype) == ((1, 4, 64, 512), BF16)


def test_the_gradients_of_our_attention_follow_float32():
    q, k, v = (jnp.asarray(x[:, :32, :2], BF16) for x in (QUERY, KEY, VALUE))

    def gradients(function, *args):
        return jax.grad(lambda q, k, v: (function(q, k, v).astype(F32) ** 2).sum(), (0, 1, 2))(
            *args
        )

    ours = gradients(dot_product_attention, q, k, v)
    truth = gradients(flax_nnx.dot_product_attention, *(x.astype(F32) for x in (q, k, v)))
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == BF16
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(
            np.asarray(a, np.float32) / scale, np.asarray(b) / scale, atol=4 * ulp(BF16)
        )


ATTENTION = [
    {},
    {"dropout_rate": 0.5, "deterministic": True},
    {"num_kv_heads": 2},
    {"normalize_qk": True},
    {"dropout_rate": 0.5, "deterministic": False},
]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("options", ATTENTION, ids=str)
def test_every_softmax_of_the_attention_layer_is_float32_and_every_matmul_half(options, half):
    with use_policy(mixed(half)):
        layer = flax_nnx.eval_shape(
            lambda: nnx.MultiHeadAttention(4, 8, rngs=nnx.Rngs(0), decode=False, **options)
        )
    definition, state = flax_nnx.split(layer)

    def forward(state, x, mask):
        return flax_nnx.merge(definition, state, copy=True)(x, mask=mask)

    for call in (forward, jax.grad(lambda *args: forward(*args).sum(), allow_int=True)):
        text = str(jax.make_jaxpr(call)(state, jnp.ones((2, 3, 8)), jnp.ones((2, 1, 3, 3), bool)))
        narrow = {BF16: "bf16", F16: "f16"}[half]
        assert not re.search(rf":{narrow}\[[\d,]+,3,3\] = exp", text)
        assert re.search(
            r":f32\[(2,4|2,2,2),3,3\] = exp", text
        )  # of grouped heads, those of each key head apart


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"normalize_qk": True}], ids=str)
def test_our_float16_attention_works_under_jit(options):
    def layer():
        return nnx.MultiHeadAttention(4, 8, rngs=nnx.Rngs(0), decode=False, **options)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 8)), F32)
    run = flax_nnx.jit(lambda layer, x: layer(x, is_causal=True))
    with use_policy("mixed_float16"):
        half = run(layer(), x)
    assert half.dtype == F32
    np.testing.assert_allclose(half, run(layer(), x), atol=8 * ulp(F16))


# --------------------------------------------------------------------------------------------------
# Output dtypes and strict promotion
# --------------------------------------------------------------------------------------------------


def test_flax_s_layers_return_float32_from_half_inputs():
    layer = flax_nnx.Linear(4, 3, rngs=flax_nnx.Rngs(0))
    repaired(relaxed(layer, jnp.ones((1, 4), BF16)).dtype == BF16)
    layer = flax_nnx.Linear(4, 3, dtype=BF16, preferred_element_type=F32, rngs=flax_nnx.Rngs(0))
    repaired(relaxed(layer, jnp.ones((1, 4), BF16)).dtype == BF16)
