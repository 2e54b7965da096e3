"""Attention's maths against float64, its derivatives, and when it is left to the fused kernel.

Truth of derivatives is the formula in numpy, differentiated by central differences."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from mpmodules.functions import attention, cudnn_attention
from policy import use_policy
from policy.core.scope import traced_for

HALVES = ["bfloat16", "float16"]
RNG, KEY = np.random.default_rng(0), jax.random.key(0)
APIS: dict[str, Any] = {"linen": linen, "nnx": nnx}


def qkv(half, heads=4, key_heads=4, queries=3, length=5, batch=(2,)) -> Any:
    shapes = ((*batch, queries, heads, 8), *[(*batch, length, key_heads, 8)] * 2)
    return tuple(jnp.asarray(RNG.normal(size=shape), half) for shape in shapes)


def exact_weights(query, key, bias=0.0, allowed: Any = True):
    q, k = (np.asarray(x, np.float64) for x in (query, key))
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    logits = np.where(allowed, logits, -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_weights_are_exact_to_float32_with_grouped_heads(dtype, key_heads):
    query, key, _ = qkv(dtype, key_heads=key_heads)
    weights = attention.dot_product_attention_weights(query, key)
    assert (weights.shape, weights.dtype) == ((2, 4, 3, 5), jnp.float32)
    np.testing.assert_allclose(weights, exact_weights(query, key), rtol=2e-5, atol=1e-6)


@pytest.mark.cases(fast=1)
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

    def products(function):
        equations = jax.make_jaxpr(function)(query, key).eqns
        return [e.outvars[0].aval.shape for e in equations if e.primitive.name == "mul"]

    assert products(weigh) == [query.shape if is_ahead else (1, 1, length, length)]
    np.testing.assert_allclose(weigh(query, key), exact_weights(query, key), rtol=2e-5, atol=1e-6)
    assert products(functools.partial(weigh, is_causal=True)) == [(1, 1, length, length)]


@pytest.mark.slow
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


REJECTED: list[tuple[str, Any]] = [
    ("must have same rank, but got 4, 3, 4", lambda q, k, v: (q, k[0], v)),
    ("batch dims must match, but got shapes", lambda q, k, v: (q, k[:1], v)),
    ("lengths must match, but got 5 and 4", lambda q, k, v: (q, k, v[:, :4])),
    ("depths must match, but got 8 and 7", lambda q, k, v: (q, k[..., :7], v)),
    ("a multiple of value heads", lambda q, k, v: (q, k, v[..., :3, :])),
]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("message", "change"), REJECTED)
def test_shapes_that_do_not_fit_are_rejected(message, change):
    with pytest.raises(ValueError, match=message):
        attention.check_shapes(*change(*qkv("float32")))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soft_cap_limits_the_logits_before_the_bias(api, dtype):
    attend = APIS[api].dot_product_attention
    query, key, value = (4 * x for x in qkv(dtype))
    bias = jnp.asarray(RNG.normal(size=(2, 4, 3, 5)), dtype)
    found = attend(query, key, value, bias, soft_cap=2.0)
    q, k, v, b = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(2 * np.tanh(logits / 2) + b)
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, v)
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= (2 if dtype == "bfloat16" else 8) * float(jnp.finfo(dtype).eps)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="soft_cap should be a positive number"):
            attend(query, key, value, soft_cap=wrong)
    with pytest.raises(ValueError, match="a soft cap"):
        half = (x.astype("bfloat16") for x in (query, key, value))
        attend(*half, soft_cap=2.0, implementation="cudnn")


@pytest.mark.slow
def test_dropout_keeps_the_mean_and_checks_its_arguments():
    weights = jnp.ones((2, 4, 64, 64), jnp.bfloat16)

    def dropped(rate=0.25, broadcast=False, rng: Any = KEY):
        return attention.dropout(weights, rate, broadcast=broadcast, batch_axes=1, rng=rng)

    assert dropped().dtype == jnp.bfloat16
    np.testing.assert_allclose(float(dropped().astype(jnp.float32).mean()), 1, atol=0.02)
    shared = dropped(broadcast=True)
    assert bool((shared == shared[:1, :1]).all())
    with pytest.raises(ValueError, match=r"dropout_rate must be in the range \[0, 1\), got 1\.0\."):
        dropped(1.0)
    with pytest.raises(ValueError, match="dropout_rng is required when dropout_rate > 0 and det"):
        dropped(rng=None)


@pytest.mark.slow
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


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("gap", [16, 40])
def test_the_gradient_of_a_sure_softmax_has_no_noise_of_rounded_cotangents(half, gap):
    _, _, value = qkv(half, heads=1, key_heads=1, length=32)
    query, cotangent = jnp.zeros((2, 64, 1, 8), half), normal_like(jnp.zeros((2, 64, 1, 8), half))
    bias = RNG.normal(size=(2, 1, 64, 32)).astype(np.float32) + gap * (np.arange(32) == 3)

    def attend(bias):
        return attention.dot_product_attention(query, jnp.zeros_like(value), value, bias=bias)

    found = jax.jit(lambda bias: jax.vjp(attend, bias)[1](cotangent)[0])(bias)
    weights = exact_weights(query, jnp.zeros_like(value), bias)
    slopes = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (cotangent, value)))
    true = weights * (slopes - (weights * slopes).sum(-1, keepdims=True))
    # One rounding of the large weight's cotangent is 1e-3 or more; float16 has no weights of e^-40.
    assert np.abs(found - true).max() <= 0.5 * np.abs(true).max() + 1e-6


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_backward_keeps_weights_in_half_and_masks_as_they_came(api, masked):
    query, key, value = qkv("bfloat16")
    mask = jnp.ones((2, 1, 3, 5), bool) if masked else None
    function = APIS[api].dot_product_attention
    _, backward = jax.vjp(lambda q, k, v: function(q, k, v, mask=mask), query, key, value)
    kept = jax.tree.leaves(backward)
    wide = [leaf.shape for leaf in kept if leaf.dtype == jnp.float32]
    assert wide == [(2, 3, 4, 1)]  # the sums of the exponentials
    assert {leaf.dtype.name for leaf in kept} <= {"bfloat16", "bool", "float32"}
    halves = [leaf.shape[-2:] for leaf in kept if leaf.dtype == jnp.bfloat16]
    assert halves.count((3, 5)) == 1  # Flax: 2
    assert [leaf.shape for leaf in kept if leaf.dtype == bool] == ([(2, 1, 3, 5)] if masked else [])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_no_keys_give_zeros_and_one_key_gives_its_value(api, dtype):
    function = APIS[api].dot_product_attention
    query, key, value = qkv(dtype)
    np.testing.assert_array_equal(function(query, key[:, :0], value[:, :0]), 0)
    expected = jnp.broadcast_to(value[:, :1], query.shape)
    np.testing.assert_array_equal(function(query, key[:, :1], value[:, :1]), expected)


class Device:
    platform, device_kind = "gpu", "GPU"

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


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_fused_kernel_is_picked_and_agrees(kernel, api, half, with_mask):
    function = APIS[api].dot_product_attention
    query, key, value = qkv(half, queries=4, length=6, batch=(2, 3))
    allowed = jnp.asarray(RNG.random(size=(2, 3, 1, 1, 6)) > 0.3).at[..., 0].set(True)
    mask = allowed if with_mask else None
    fused = function(query, key, value, mask=mask)
    assert kernel[0]["shapes"][0] == (6, 4, 4, 8)
    assert (fused.shape, fused.dtype) == (query.shape, query.dtype)
    assert (kernel[0]["mask"] is None) is not with_mask
    plain = function(query, key, value, mask=mask, implementation="xla")
    assert len(kernel) == 1
    error = np.abs(np.asarray(fused, np.float32) - np.asarray(plain, np.float32)).max()
    assert error <= 2 * float(jnp.finfo(half).eps)


@pytest.mark.slow
def test_bias_and_causality_reach_the_kernel(kernel):
    query, key, value = qkv("bfloat16", queries=4, length=4)
    bias = jnp.asarray(RNG.normal(size=(4, 4, 4)), "bfloat16")  # (heads, queries, keys)
    fused = nnx.dot_product_attention(query, key, value, bias=bias, is_causal=True)
    assert kernel[0]["is_causal"] and kernel[0]["bias"].shape == (1, 4, 4, 4)
    options: dict[str, Any] = {"is_causal": True, "implementation": "xla"}
    plain = nnx.dot_product_attention(query, key, value, bias=bias[None], **options)
    np.testing.assert_allclose(fused.astype("float32"), plain.astype("float32"), atol=0.02)


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


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("what", [*PICKED_NOT, *PICKED])
@pytest.mark.parametrize("api", APIS)
def test_the_fused_kernel_is_picked_for_what_it_can_do(kernel, monkeypatch, api, what):
    if (api, what) == ("nnx", "float32"):
        pytest.skip("Flax's own, which calls JAX's")
    asked = {"capability": "9.0", "devices": 1, "length": 4, "width": 64, "dtype": "bfloat16"}
    asked |= PICKED_NOT.get(what, {}) | PICKED.get(what, {})
    capability, devices = asked.pop("capability"), asked.pop("devices")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(capability)])
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x = jax.ShapeDtypeStruct((1, asked.pop("length"), 2, asked.pop("width")), asked.pop("dtype"))
    jax.eval_shape(lambda x: APIS[api].dot_product_attention(x, x, x, **asked), x)
    assert bool(kernel) is (what in PICKED)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_an_attention_layer_uses_the_kernel_and_its_attention_fn_overrides_it(kernel, api):
    x = jnp.ones((2, 4, 16))

    def call(**options):
        if api == "linen":
            return linen.MultiHeadDotProductAttention(2, **options).init_with_output(
                jax.random.key(0), x
            )[0]
        return nnx.MultiHeadAttention(2, 16, decode=False, rngs=flax_nnx.Rngs(0), **options)(x)

    function = APIS[api].dot_product_attention
    with use_policy("mixed_bfloat16"):
        call()
        assert len(kernel) == 1
        call(attention_fn=lambda *args, **kwargs: function(*args, **kwargs, implementation="xla"))
    assert len(kernel) == 1


def kernels_of(api, device, **shape):
    """Counts the kernels in a gradient that is traced for a device, attention's results kept."""
    options: dict[str, Any] = {"is_causal": True}
    if api == "linen":
        options = {"mask": linen.make_causal_mask(jnp.ones((2, shape["length"])))}
    x = jax.ShapeDtypeStruct((2, shape["length"], 4, shape["width"]), "bfloat16")

    def loss(query, key, value):
        attend = functools.partial(APIS[api].dot_product_attention, **options)
        kept = jax.checkpoint_policies.save_only_these_names("attention")
        return jnp.sum(jax.checkpoint(attend, policy=kept)(query, key, value).astype("float32"))

    with traced_for(device):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r"(?<=__cudnn\$fmha)\w+|CAUSAL|NO_MASK", program))


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_cudnns_kernel_is_traced_for_a_gpu_that_is_not_there(monkeypatch, api):
    found = kernels_of(api, Device("9.0"), length=256, width=64)
    assert found == {"Softmax": 1, "SoftmaxBackward": 1, "CAUSAL": 2}
    assert not kernels_of(api, Device("7.5"), length=256, width=64)
    assert not kernels_of(api, Device("9.0"), length=256, width=136)  # JAX asks the process's GPU
    monkeypatch.setattr(cudnn_attention, "_ahead_of_time", lambda: None)  # a JAX without the name
    assert not kernels_of(api, Device("9.0"), length=256, width=64)


def test_a_mask_is_given_to_the_kernel_as_causality_where_it_is_no_other(kernel):
    x = jax.ShapeDtypeStruct((2, 6, 4, 8), "bfloat16")
    causal = linen.make_causal_mask(jnp.ones((2, 6)))
    for mask in (causal, causal.at[0, 0, 5, 0].set(0.0), jnp.ones((1, 1, 6, 6), bool)):
        jax.eval_shape(functools.partial(linen.dot_product_attention, mask=mask), x, x, x)
    given = [(call["is_causal"], call["mask"] is None) for call in kernel]
    assert given == [(True, True), (False, False), (False, True)]


REJECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"implementation": "flash"}, "should be None, 'xla', 'cudnn' or 'splash', but got 'flash'"),
    (
        {"implementation": "cudnn", "dropout_rate": 0.5, "precision": "highest"},
        r"implementation='cudnn' does not support dropout, a precision\. Leave it out",
    ),
    (
        {"implementation": "cudnn", "dtype": jnp.float32},
        "implementation='cudnn' does not support float32 queries",
    ),
]


def test_an_implementation_that_can_not_do_what_is_asked_is_rejected():
    for api in APIS.values():
        for options, text in REJECTIONS:
            with pytest.raises(ValueError, match=text):
                api.dot_product_attention(*qkv("bfloat16"), **options)
    rejected = pytest.raises(ValueError, match="does not support reduction_dtype=float64")
    with jax.enable_x64(True), use_policy("c=bf16,p=f32,o=f32,reduction=f64"), rejected:
        linen.dot_product_attention(*qkv("bfloat16"), implementation="cudnn")


BATCH, QUERIES, KEYS, HEADS = 2, 3, 5, 4  # those of `qkv`
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"key_heads": 2},
    "one key head": {"key_heads": 1},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "causal, grouped, with a bias": {"is_causal": True, "key_heads": 2, "bias": True},
    "precision": {"precision": "highest"},
    "a precision for each operand": {
        "precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
    },
}
Operands = tuple[Any, ...]  # queries, keys, values, and the bias where there is one


def case(
    half: str, key_heads: int = HEADS, bias: bool = False, mask: bool = False, **options: Any
) -> Any:
    """Operands, and the other arguments. The mask leaves the second query of every head no key."""
    operands = list(qkv(half, key_heads=key_heads))
    if bias:
        operands.append(jnp.asarray(RNG.normal(size=(1, HEADS, QUERIES, KEYS)), jnp.float32))
    if mask:
        allowed = RNG.random(size=(BATCH, 1, QUERIES, KEYS)) > 0.3
        allowed[..., 0] = True
        allowed[..., 1, :] = False
        options["mask"] = jnp.asarray(allowed)
    return tuple(operands), options


def ours(options: Any) -> Callable[..., jax.Array]:
    def run(query: Any, key: Any, value: Any, bias: Any = None) -> jax.Array:
        return attention.dot_product_attention(query, key, value, bias=bias, **options)

    return run


def exact(options: Any) -> Callable[..., np.ndarray]:
    def run(query: Any, key: Any, value: Any, bias: Any = 0.0) -> np.ndarray:
        allowed = np.asarray(options.get("mask", True)) & np.ones((QUERIES, KEYS), bool)
        if options.get("is_causal"):
            allowed = allowed & np.tri(QUERIES, KEYS, dtype=bool)
        value = np.repeat(value, HEADS // value.shape[-2], axis=-2)
        return np.einsum("bhqk,bkhd->bqhd", exact_weights(query, key, bias, allowed), value)

    return run


def normal_like(x: jax.Array) -> jax.Array:
    return jnp.asarray(RNG.normal(size=x.shape), x.dtype)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def directional(function: Any, at: Operands, towards: Operands, step: float = 1e-5) -> Any:
    pairs = list(zip(at, towards, strict=True))
    high, low = (function(*(x + by * t for x, t in pairs)) for by in (step, -step))
    return jax.tree.map(lambda high, low: (high - low) / (2 * step), high, low)


def gradients(function: Any, at: Operands, weights: np.ndarray, step: float = 1e-5) -> list[Any]:
    found = [np.zeros(x.shape) for x in at]
    for i, slopes in enumerate(found):
        for index in np.ndindex(slopes.shape):
            towards = [np.zeros(x.shape) for x in at]
            towards[i][index] = 1
            slopes[index] = (weights * directional(function, at, tuple(towards), step)).sum()
    return found


def assert_near(found: Any, true: np.ndarray, roundings: float, half: str) -> None:
    """Within so many roundings to half of the largest number."""
    error = np.abs(wide(found) - true).max() / np.abs(true).max()
    assert error <= roundings * float(jnp.finfo(half).eps) / 2


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
    ("name", "half"), [*((name, "float16") for name in CASES), ("plain", "bfloat16")]
)
def test_values_and_both_modes_of_derivative_are_those_of_float64(name, half):
    at, options = case(half, **CASES[name])
    tangents, cotangent = jax.tree.map(normal_like, (at, at[0]))

    @jax.jit
    def run(at: Any, tangents: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(ours(options), *at)
        return y, pull(cotangent), jax.jvp(ours(options), at, tangents)[1]

    y, cotangents, tangent = run(at, tangents, cotangent)
    truth = exact(options)
    assert y.dtype == tangent.dtype == half
    assert_near(y, truth(*wide(at)), 2, half)  # of the exponentials, and of the result
    assert_near(tangent, directional(truth, wide(at), wide(tangents)), 8, half)
    slopes = gradients(truth, wide(at), wide(cotangent))
    for operand, found, true in zip(at, cotangents, slopes, strict=True):
        assert found.dtype == operand.dtype
        assert_near(found, true, 8, half)  # of weights, cotangents and products, in sums


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["grouped heads", "mask", "bias"])
def test_second_derivatives_are_those_of_float64(name):
    half = "float16"
    at, options = case(half, **CASES[name])
    tangents, cotangent = jax.tree.map(normal_like, (at, at[0]))
    every = tuple(range(len(at)))

    def loss(*at: Any) -> jax.Array:
        return jnp.sum(ours(options)(*at).astype(jnp.float32) * cotangent.astype(jnp.float32))

    def along(*at: Any) -> jax.Array:
        return jax.jvp(loss, at, tangents)[1]

    def along_slope(*at: Any) -> jax.Array:
        products = jax.tree.map(lambda s, t: s * t, jax.grad(loss, every)(*at), tangents)
        return jnp.stack([jnp.sum(x.astype(jnp.float32)) for x in products]).sum()

    @jax.jit
    def products(at: Any) -> Any:
        forward_over_reverse = jax.jvp(jax.grad(loss, every), at, tangents)[1]
        return forward_over_reverse, jax.grad(along, every)(*at), jax.grad(along_slope, every)(*at)

    def slopes(*at: Any) -> Any:
        return gradients(exact(options), at, wide(cotangent), 1e-4)

    true = directional(slopes, wide(at), wide(tangents), 1e-4)
    for found in products(at):
        for ours_, exact_ in zip(found, true, strict=True):
            assert_near(ours_, exact_, 12, half)


@pytest.mark.slow
def test_frozen_operands_leave_the_gradients_of_others_as_they_are():
    at, options = case("bfloat16", bias=True)
    loss = lambda *at: jnp.sum(ours(options)(*at).astype(jnp.float32) ** 2)  # noqa: E731
    every = jax.grad(loss, (0, 1, 2, 3))(*at)
    for free in ((0,), (1,), (2,), (3,), (0, 2), (1, 3)):
        for found, i in zip(jax.grad(loss, free)(*at), free, strict=True):
            assert_near(found, wide(every[i]), 2, "bfloat16")


@pytest.mark.slow
def test_batches_are_attended_one_at_a_time():
    at, options = case("bfloat16", key_heads=2)
    loss = lambda *at: jnp.sum(ours(options)(*at).astype(jnp.float32) ** 2)  # noqa: E731
    batched = jax.vmap(jax.grad(loss, (0, 1, 2)))(*at)
    for found, alone in zip(batched, jax.grad(loss, (0, 1, 2))(*at), strict=True):
        assert_near(found, wide(alone), 2, "bfloat16")


SHAPES = [
    ("bias", (BATCH, HEADS, 1, KEYS)),
    ("bias", (1, HEADS, QUERIES, KEYS)),
    ("bias", (1, 1, QUERIES, 1)),
    ("mask", (BATCH, HEADS, 1, KEYS)),
    ("mask", (HEADS, QUERIES, KEYS)),
    ("mask", (QUERIES, KEYS)),
    ("mask", (1, 1, KEYS)),
]


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_grouped_heads_take_a_bias_and_a_mask_of_every_shape(name, shape):
    at, _ = case("bfloat16", key_heads=2)
    given = RNG.normal(size=shape) if name == "bias" else RNG.random(size=shape) > 0.3
    options = {name: jnp.asarray(given, jnp.float32 if name == "bias" else bool)}
    repeated = (at[0], *(jnp.repeat(x, HEADS // 2, axis=-2) for x in at[1:]))
    expected = attention.dot_product_attention(*repeated, **options)
    found = attention.dot_product_attention(*at, **options)
    assert_near(found, wide(expected), 1, "bfloat16")
