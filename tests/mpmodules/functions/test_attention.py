"""Attention's maths against float64, and when it is left to the fused kernel."""

import functools
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from mpmodules.functions import attention
from policy import use_policy

HALVES = ["bfloat16", "float16"]
RNG = np.random.default_rng(0)
WINGS: dict[str, Any] = {"linen": linen, "nnx": nnx}


def qkv(half, heads=4, key_heads=4, queries=3, length=5, batch=(2,)) -> Any:
    shapes = ((*batch, queries, heads, 8), *[(*batch, length, key_heads, 8)] * 2)
    return tuple(jnp.asarray(RNG.normal(size=shape), half) for shape in shapes)


def exact_weights(query, key):
    q, k = (np.asarray(x, np.float64) for x in (query, key))
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_weights_are_exact_to_float32_with_grouped_heads(dtype, key_heads):
    query, key, _ = qkv(dtype, key_heads=key_heads)
    weights = attention.dot_product_attention_weights(query, key)
    assert (weights.shape, weights.dtype) == ((2, 4, 3, 5), jnp.float32)
    np.testing.assert_allclose(weights, exact_weights(query, key), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "width", "half", "is_ahead"),
    [
        (128, 16, "bfloat16", True),
        (120, 16, "bfloat16", False),
        (128, 8, "bfloat16", False),
        (128, 16, "float16", False),
    ],
)
def test_queries_are_scaled_in_place_of_logits_where_that_rounds_nothing(
    length, width, half, is_ahead
):
    query, key = (jnp.asarray(RNG.normal(size=(1, length, 1, width)), half) for _ in range(2))
    weigh = attention.dot_product_attention_weights
    products = [
        e.outvars[0].aval.shape
        for e in jax.make_jaxpr(weigh)(query, key).eqns
        if e.primitive.name == "mul"
    ]
    assert products == [query.shape if is_ahead else (1, 1, length, length)]
    np.testing.assert_allclose(weigh(query, key), exact_weights(query, key), rtol=2e-5, atol=1e-6)
    masked = jax.make_jaxpr(functools.partial(weigh, is_causal=True))(query, key)
    assert [e.outvars[0].aval.shape for e in masked.eqns if e.primitive.name == "mul"] == [
        (1, 1, length, length)
    ]


@pytest.mark.parametrize("half", HALVES)
def test_a_row_without_keys_is_uniform_forward_and_finite_backward(half):
    query, key, _ = qkv(half)
    mask = jnp.ones((1, 1, 3, 5), bool).at[..., 1, :].set(False)

    def weights(query):
        return attention.dot_product_attention_weights(
            query, key, mask=mask, bias=jnp.full((1, 1, 1, 1), -1e30)
        )

    np.testing.assert_allclose(weights(query)[:, :, 1], 0.2, rtol=1e-6)
    assert bool(jnp.isfinite(jax.grad(lambda q: weights(q).sum())(query).astype(jnp.float32)).all())


REFUSED: list[tuple[str, Any]] = [
    ("must have same rank, but got 4, 3, 4", lambda q, k, v: (q, k[0], v)),
    ("batch dims must match, but got shapes", lambda q, k, v: (q, k[:1], v)),
    ("lengths must match, but got 5 and 4", lambda q, k, v: (q, k, v[:, :4])),
    ("depths must match, but got 8 and 7", lambda q, k, v: (q, k[..., :7], v)),
    ("a multiple of value heads", lambda q, k, v: (q, k, v[..., :3, :])),
]


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_shapes_that_do_not_fit_are_refused(message, change):
    with pytest.raises(ValueError, match=message):
        attention.check_shapes(*change(*qkv("float32")))


def test_dropout_keeps_the_mean_and_checks_its_arguments():
    weights = jnp.ones((2, 4, 64, 64), jnp.bfloat16)
    dropped = attention.dropout(weights, 0.25, broadcast=False, batch_axes=1, rng=jax.random.key(0))
    assert dropped.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(dropped.astype(jnp.float32).mean()), 1, atol=0.02)
    shared = attention.dropout(weights, 0.25, broadcast=True, batch_axes=1, rng=jax.random.key(0))
    assert bool((shared == shared[:1, :1]).all())
    with pytest.raises(ValueError, match=r"dropout_rate must be in the range \[0, 1\), got 1\.0\."):
        attention.dropout(weights, 1.0, broadcast=True, batch_axes=1, rng=jax.random.key(0))
    with pytest.raises(
        ValueError, match="dropout_rng is required when dropout_rate > 0 and deterministic=False"
    ):
        attention.dropout(weights, 0.5, broadcast=True, batch_axes=1, rng=None)


# --- gradients and what they keep -----------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_by_the_logits_sums_to_zero_over_the_keys(half):
    bias = jnp.asarray(RNG.normal(size=(1, 4, 3, 64)), jnp.float32)
    query, key, _ = qkv(half, length=64)
    weight = jnp.asarray(RNG.normal(size=(2, 4, 3, 64)), jnp.float32)

    def loss(bias):
        weights = attention.dot_product_attention_weights(query, key, bias=bias, dtype=half)
        return jnp.sum(weights.astype(jnp.float32) * weight.astype(half).astype(jnp.float32))

    by_bias = np.asarray(jax.grad(loss)(bias), np.float64)
    assert np.abs(by_bias.sum(-1)).max() <= 1e-6 * np.abs(by_bias).max() * 64


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_backward_keeps_weights_in_half_and_masks_as_they_came(wing, masked):
    query, key, value = qkv("bfloat16")
    mask = jnp.ones((2, 1, 3, 5), bool) if masked else None
    function = WINGS[wing].dot_product_attention
    _, backward = jax.vjp(lambda q, k, v: function(q, k, v, mask=mask), query, key, value)
    kept = jax.tree.leaves(backward)
    wide = [leaf.shape for leaf in kept if leaf.dtype == jnp.float32]
    assert wide == [(2, 3, 4, 1)]  # the sums of the exponentials
    assert {leaf.dtype.name for leaf in kept} <= {"bfloat16", "bool", "float32"}
    assert (
        sum(leaf.shape[-2:] == (3, 5) for leaf in kept if leaf.dtype == jnp.bfloat16) == 1
    )  # Flax: 2
    assert [leaf.shape for leaf in kept if leaf.dtype == bool] == ([(2, 1, 3, 5)] if masked else [])


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_linen_takes_grouped_heads(dtype):
    query, key, value = qkv(dtype, key_heads=2)
    repeated_key, repeated_value = (jnp.repeat(x, 2, axis=-2) for x in (key, value))
    ours = linen.dot_product_attention(query, key, value)
    expected = linen.dot_product_attention(query, repeated_key, repeated_value)
    assert ours.dtype == query.dtype
    ulp = float(jnp.finfo(dtype).eps)
    ours, expected = (np.asarray(x, np.float32) for x in (ours, expected))
    np.testing.assert_allclose(ours, expected, rtol=ulp, atol=1e-6)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_no_keys_give_zeros_and_one_key_gives_its_value(wing, dtype):
    function = WINGS[wing].dot_product_attention
    query, key, value = qkv(dtype)
    np.testing.assert_array_equal(function(query, key[:, :0], value[:, :0]), 0)
    expected = jnp.broadcast_to(value[:, :1], query.shape)
    np.testing.assert_array_equal(function(query, key[:, :1], value[:, :1]), expected)


# --- the fused kernel -----------------------------------------------------------------------------


class Device:
    platform = "gpu"

    def __init__(self, compute_capability):
        self.compute_capability = compute_capability


@pytest.fixture
def kernel(monkeypatch):
    """A GPU with the kernel, played by JAX's own XLA implementation; the calls that reached it."""
    calls: list[dict[str, Any]] = []
    plain = jax.nn.dot_product_attention

    def recorded(query, key, value, **kwargs):
        calls.append(kwargs | {"shapes": (query.shape, key.shape, value.shape)})
        assert kwargs.pop("implementation") == "cudnn"
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            wide = (x.astype(jnp.float32) for x in (query, key, value))
            return plain(*wide, implementation="xla", **kwargs).astype(query.dtype)

    monkeypatch.setattr(jax, "local_devices", lambda: [Device("9.0")])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    return calls


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_fused_kernel_is_picked_and_agrees(kernel, wing, half, with_mask):
    function = WINGS[wing].dot_product_attention
    query, key, value = qkv(half, queries=4, length=6, batch=(2, 3))
    mask = (
        jnp.asarray(RNG.random(size=(2, 3, 1, 1, 6)) > 0.3).at[..., 0].set(True)
        if with_mask
        else None
    )
    fused = function(query, key, value, mask=mask)
    assert (
        kernel[0]["shapes"][0] == (6, 4, 4, 8)
        and fused.shape == query.shape
        and fused.dtype == query.dtype
    )
    assert (kernel[0]["mask"] is None) is not with_mask
    plain = function(query, key, value, mask=mask, implementation="xla")
    assert len(kernel) == 1
    error = np.abs(np.asarray(fused, np.float32) - np.asarray(plain, np.float32)).max()
    assert error <= 2 * float(jnp.finfo(half).eps)


def test_bias_and_causality_reach_the_kernel(kernel):
    query, key, value = qkv("bfloat16", queries=4, length=4)
    bias = jnp.asarray(RNG.normal(size=(4, 4, 4)), "bfloat16")  # (heads, queries, keys)
    fused = nnx.dot_product_attention(query, key, value, bias=bias, is_causal=True)
    assert kernel[0]["is_causal"] and kernel[0]["bias"].shape == (1, 4, 4, 4)
    plain = nnx.dot_product_attention(
        query, key, value, bias=bias[None], is_causal=True, implementation="xla"
    )
    np.testing.assert_allclose(
        np.asarray(fused, np.float32), np.asarray(plain, np.float32), atol=0.02
    )


# What is asked for, beside four queries of bfloat16 with heads of width 64 on a device of 9.0.
PICKED_NOT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
    "a precision": {"precision": "highest"},
    "a float32 bias": {"bias": jnp.zeros((1, 2, 4, 4))},
    "float32": {"dtype": "float32"},
    "a masked odd length": {"length": 3, "mask": jnp.ones((1, 1, 1, 3), bool)},
    "several devices": {"devices": 8},
    "an old device": {"capability": "7.5"},
    "wide heads of a middling device": {"capability": "8.9", "width": 256},
    "heads that are too wide": {"width": 264},
    "heads of an odd width": {"width": 20},
    "a device of another maker": {"capability": "gfx90a"},
    "a device that says nothing": {"capability": ""},
}
PICKED: dict[str, dict[str, Any]] = {
    "an odd length": {"length": 3},
    "wide heads of a new device": {"width": 256},
    "a device of 8.0": {"capability": "8.0", "width": 128},
}


@pytest.mark.parametrize("what", [*PICKED_NOT, *PICKED])
@pytest.mark.parametrize("wing", WINGS)
def test_the_fused_kernel_is_picked_for_what_it_can_do(kernel, monkeypatch, wing, what):
    if (wing, what) == ("nnx", "float32"):
        pytest.skip("Flax's own, which calls JAX's")
    asked = {"capability": "9.0", "devices": 1, "length": 4, "width": 64, "dtype": "bfloat16"}
    asked |= PICKED_NOT.get(what, {}) | PICKED.get(what, {})
    capability, devices = asked.pop("capability"), asked.pop("devices")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(capability)])
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x = jax.ShapeDtypeStruct((1, asked.pop("length"), 2, asked.pop("width")), asked.pop("dtype"))
    jax.eval_shape(lambda x: WINGS[wing].dot_product_attention(x, x, x, **asked), x)
    assert bool(kernel) is (what in PICKED)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_attention_layer_uses_the_kernel_and_its_attention_fn_overrides_it(kernel, wing):
    x = jnp.ones((2, 4, 16))

    def call(**options):
        if wing == "linen":
            return linen.MultiHeadDotProductAttention(2, **options).init_with_output(
                jax.random.key(0), x
            )[0]
        return nnx.MultiHeadAttention(2, 16, decode=False, rngs=flax_nnx.Rngs(0), **options)(x)

    function = WINGS[wing].dot_product_attention
    with use_policy("mixed_bfloat16"):
        call()
        assert len(kernel) == 1
        call(attention_fn=lambda *args, **kwargs: function(*args, **kwargs, implementation="xla"))
    assert len(kernel) == 1


def test_an_implementation_that_can_not_do_what_is_asked_is_refused():
    query, key, value = qkv("bfloat16")
    for function in (wing.dot_product_attention for wing in WINGS.values()):
        with pytest.raises(
            ValueError, match="should be None, 'xla', 'cudnn' or 'splash', but got 'flash'"
        ):
            function(query, key, value, implementation="flash")
        with pytest.raises(
            ValueError,
            match=r"implementation='cudnn' does not support dropout, a precision\. Leave it out",
        ):
            function(
                query, key, value, implementation="cudnn", dropout_rate=0.5, precision="highest"
            )
        with pytest.raises(
            ValueError, match="implementation='cudnn' does not support float32 queries"
        ):
            function(*qkv("float32"), implementation="cudnn")
    refused = pytest.raises(ValueError, match="does not support reduction_dtype=float64")
    with jax.enable_x64(True), use_policy("c=bf16,p=f32,o=f32,reduction=f64"), refused:
        linen.dot_product_attention(*qkv("bfloat16"), implementation="cudnn")


def test_without_a_gpu_float32_is_flaxs_program():
    x = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)
    for ours, theirs in ((linen, flax_linen), (nnx, flax_nnx)):
        programs = [
            jax.jit(w.dot_product_attention).lower(x, x, x).as_text() for w in (ours, theirs)
        ]
        assert programs[0] == programs[1]
