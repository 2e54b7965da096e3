"""Layers that nnx has alone: LoRA, RoPE and EMA."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import (
    Policy,
    cast_floating,
    finite_of,
    get_policy,
    master_params,
    mixed_precision,
    use_policy,
)
from tests.programs import named, operations

X = jax.random.normal(jax.random.key(0), (3, 8))


def build(layers, name, **kwargs) -> Any:
    kwargs |= {"b_initializer": flax_nnx.initializers.normal(), "rngs": flax_nnx.Rngs(0)}
    if name == "LoRA":
        return layers.LoRA(8, 2, 4, **kwargs)
    return layers.LoRALinear(8, 4, lora_rank=2, **kwargs)


def state(model):
    return flax_nnx.to_pure_dict(flax_nnx.state(model))


def stored(model):
    return {leaf.dtype for leaf in jax.tree.leaves(state(model))}


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
@pytest.mark.parametrize("name", ("LoRA", "LoRALinear"))
def test_dtypes_of_a_ported_lora_are_the_policys(name, policy):
    policy = get_policy(policy)
    port = nnx.apply_policy(build(flax_nnx, name), policy)
    gradients = flax_nnx.grad(lambda m: jnp.sum(m(X).astype(jnp.float32)))(port)
    assert port(X).dtype == policy.output_dtype
    assert stored(port) == stored(gradients) == {policy.param_dtype}


def test_what_a_base_module_returns_is_added_in_compute_dtype():
    base = nnx.Linear(8, 4, rngs=flax_nnx.Rngs(0), dtype_policy="mixed_bfloat16")
    assert base(X).dtype == jnp.float32
    with use_policy("mixed_bfloat16"):
        layer = build(nnx, "LoRA", base_module=base)
    assert layer(X).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"`self\.base_module` must be callable"):
        build(nnx, "LoRA", base_module=flax_nnx.Dict())(X)


def test_explicit_dtypes_of_the_low_rank_part_are_obeyed():
    with (
        use_policy("bfloat16"),
        pytest.warns(UserWarning, match="LoRA at 'lora' has an explicit dtype=float32"),
    ):
        layer = build(nnx, "LoRALinear", lora_dtype=jnp.float32, lora_param_dtype=jnp.float32)
    assert layer.lora.lora_a[...].dtype == jnp.float32 and layer.kernel[...].dtype == jnp.bfloat16
    assert layer.lora.dtype == jnp.float32 and layer(X).dtype == jnp.bfloat16


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("name", "over"), (("LoRA", ""), ("LoRA", "a layer"), ("LoRALinear", "")))
def test_one_that_is_a_boundary_returns_accumulators_and_runs_backward_in_half(name, over):
    def make(policy):
        base = nnx.Linear(8, 4, rngs=flax_nnx.Rngs(1), dtype_policy=policy)
        return build(nnx, name, dtype_policy=policy, **({"base_module": base} if over else {}))

    rounded_to_half = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    half, full = make("mixed_bfloat16"), make("float32")
    for layer in (half, full):
        flax_nnx.update(layer, jax.tree.map(rounded_to_half, state(layer)))
    x = rounded_to_half(X)
    graph, params = flax_nnx.split(half)
    total = lambda params, x: flax_nnx.merge(graph, params, copy=True)(x).sum()  # noqa: E731
    forward = named(operations(lambda x: half(x), x), "dot_general")
    backward = named(operations(jax.grad(total, argnums=(0, 1)), params, x), "dot_general")
    products = [op.outputs for op in forward]
    assert products.count(("float32",)) == (1 if name == "LoRA" else 2)
    # x @ lora_a, which goes into the next product, and what a layer inside of the boundary hands on
    assert products.count(("bfloat16",)) == (2 if over else 1)
    assert len(backward) == 3 * len(forward)
    assert {dtype for op in backward for dtype in op.inputs} == {"bfloat16"}
    lora = full if name == "LoRA" else full.lora
    between, base = x @ lora.lora_a[...], full(x) - x @ lora.lora_a[...] @ lora.lora_b[...]
    rounded = rounded_to_half(between) @ lora.lora_b[...]
    base = rounded_to_half(full.base_module(x)) if over else base
    np.testing.assert_allclose(half(x), base + rounded, rtol=0, atol=2e-6)


newer = pytest.mark.skipif(not hasattr(flax_nnx, "RoPE"), reason="this Flax has no RoPE and no EMA")
HALVES = (jnp.bfloat16, jnp.float16)
Q = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))  # (batch, length, heads, width)


def rotated(x, positions):
    """The truth in float64: x (length, width)."""
    x, positions = np.asarray(x, np.float64), np.asarray(positions, np.float64)
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@newer
@pytest.mark.filterwarnings("ignore:.*value.*:DeprecationWarning")
def test_attention_with_rope_without_a_policy_is_upstreams_bit_for_bit():
    ours, theirs = (
        layers.dot_product_attention_with_rope(Q, Q, Q, rope=layers.RoPE())
        for layers in (nnx, flax_nnx)
    )
    np.testing.assert_array_equal(ours, theirs)


@newer
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("policy", (None, "mixed"))
def test_rope_in_half_is_rounded_once(dtype, policy):
    x = jax.random.normal(jax.random.key(1), (6, 8)).astype(dtype)
    positions = jnp.arange(6, dtype=jnp.int32) + 1001  # bfloat16 counts by 8 there
    with use_policy(None if policy is None else Policy("f32", dtype, "f32")):
        rope: Any = nnx.RoPE(embedding_size=8, max_seq_len=2000)
    y = rope(x, positions)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float64),
        rotated(x, positions),
        rtol=0.51 * float(jnp.finfo(dtype).eps),
        atol=2e-4,
    )
    assert rope.cached_sin[...].dtype == jnp.float32
    assert jax.grad(lambda x: jnp.sum(rope(x).astype(jnp.float32)))(x).dtype == dtype


@newer
def test_a_boundary_of_rope_leaves_positions_alone():
    rope = nnx.RoPE(dtype_policy="mixed_bfloat16")
    x, positions = Q[0, :, 0], jnp.arange(6.0) + 1001
    y = rope(x, positions)
    assert y.dtype == jnp.float32
    # nothing was rounded on the way in or out
    np.testing.assert_allclose(y, rotated(x, positions), atol=1e-3)


@newer
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_with_rope_keeps_dtype_and_accuracy(dtype):
    half = Q.astype(dtype)
    rope = nnx.RoPE(embedding_size=8, max_seq_len=16)
    y = jax.jit(lambda q: nnx.dot_product_attention_with_rope(q, q, q, rope=rope))(half)
    expected = nnx.dot_product_attention_with_rope(*(half.astype(jnp.float32),) * 3, rope=rope)
    assert y.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float32), expected, atol=4 * float(jnp.finfo(dtype).eps)
    )


@newer
def test_multi_head_attention_takes_rope():
    rope = nnx.RoPE(embedding_size=8, max_seq_len=16)
    with use_policy("mixed_bfloat16"):
        layer: Any = nnx.MultiHeadAttention(
            num_heads=4, in_features=32, rngs=flax_nnx.Rngs(0), decode=False,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
        )  # fmt: skip
    x = jax.random.normal(jax.random.key(2), (2, 6, 32))
    y = layer(x, input_positions=jnp.broadcast_to(jnp.arange(6), (2, 6)))
    assert y.dtype == jnp.float32 and bool(jnp.isfinite(y).all())
    np.testing.assert_allclose(y, layer(x), atol=1e-6)
    positions = jnp.stack([jnp.arange(6), jnp.arange(6) + 5])  # each token's own
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    y = attend(Q, Q, Q, input_positions=positions)
    alone = attend(Q[1:], Q[1:], Q[1:], input_positions=positions[1])
    np.testing.assert_allclose(y[1], alone[0], atol=1e-6)


REJECTED = (
    r"An EMA should be of float32 params, but kernel is {0}: in half precision the average "
    r"stops following them\. Average the masters, master_params\(nnx\.state\(model, nnx\.Param\), "
    r"optimizer\), or cast_floating"
)


def linear(dtype):
    return nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0), param_dtype=dtype)


@newer
def test_an_ema_of_float32_params_is_flaxs():
    model, ours, theirs = (
        linear(jnp.float32),
        *(cls(linear(jnp.float32), 0.9) for cls in (nnx.EMA, flax_nnx.EMA)),
    )
    assert isinstance(ours, flax_nnx.EMA)
    model.kernel[...] = model.kernel[...] + 1
    for ema in (ours, theirs):
        ema.update(model)
    np.testing.assert_array_equal(ours.params["kernel"][...], theirs.params["kernel"][...])
    assert ours.apply_to(model).kernel is ours.params["kernel"]


@pytest.mark.cases(fast=1)
@newer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_ema_of_half_precision_params_is_rejected_by_name(dtype):
    with pytest.raises(ValueError, match=REJECTED.format(dtype)):
        nnx.EMA(linear(dtype), 0.9)
    ema = nnx.EMA(cast_floating(nnx.state(linear(dtype)), "float32"), 0.9)
    with pytest.raises(ValueError, match=REJECTED.format(dtype)):
        ema.update(linear(dtype))
    nnx.EMA(linear(dtype), 0.9, only=nnx.BatchStat)  # tracks none of them


@pytest.mark.slow
@newer
def test_an_ema_of_half_params_stands_still_in_flax_and_the_masters_average_follows():
    model: Any = linear(jnp.bfloat16)
    model.kernel[...] = jnp.ones((2, 2), jnp.bfloat16)
    optimizer: Any = nnx.Optimizer(
        model, mixed_precision(optax.sgd(1e-2), "bfloat16"), wrt=nnx.Param
    )
    upstream: Any = flax_nnx.EMA(model, 0.999)
    ours: Any = nnx.EMA(master_params(nnx.state(model, nnx.Param), optimizer), 0.999)

    @nnx.jit
    def step(model, optimizer, ours, upstream):
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(
                model, jax.tree.map(lambda p: jnp.ones(p.shape), nnx.state(model, nnx.Param))
            )
        ours.update(master_params(nnx.state(model, nnx.Param), optimizer))
        upstream.update(model)

    for _ in range(100):
        step(model, optimizer, ours, upstream)
    assert finite_of(optimizer)
    expected, weight = 1.0, 1.0
    for _ in range(100):
        weight -= 1e-2
        expected = 0.999 * expected + 0.001 * weight
    np.testing.assert_allclose(ours.params["kernel"][...], expected, rtol=1e-5)
    if not np.array_equal(upstream.params["kernel"][...], np.ones((2, 2))):  # the true one is 0.95
        pytest.skip("this Flax averages half-precision params without losing them")
