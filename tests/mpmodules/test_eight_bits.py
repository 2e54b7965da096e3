"""Layers of both wings under a policy with matmuls in 8 bits: programs, results and gradients."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import policy
from mpmodules import linen, nnx, use_policy
from tests.mpmodules.wings import BOTH, WINGS, Text, dense, layer, layer_norm
from tests.programs import named, operations

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 16, 32)), jnp.float32)
EIGHT = {"mixed_float8": ("float8_e4m3fn", "float8_e5m2"), "mixed_int8": ("int8", "int8")}
HALF, KEPT = ("bfloat16", "bfloat16"), "p=f32,c=bf16,o=bf16"


def of_nnx(name: str, *args: Any, **options: Any) -> Any:
    return lambda **k: getattr(nnx, name)(*args, **options, **k, rngs=flax_nnx.Rngs(0))


LAYERS: dict[str, Callable[..., Any]] = {
    "linen/Dense": lambda **k: linen.Dense(8, **k),
    "linen/Dense without a bias": lambda **k: linen.Dense(8, use_bias=False, **k),
    "linen/DenseGeneral": lambda **k: linen.DenseGeneral((2, 4), axis=(-2, -1), **k),
    "linen/DenseGeneral, batched": lambda **k: linen.DenseGeneral(4, axis=2, batch_dims=(0,), **k),
    "linen/Einsum": lambda **k: linen.Einsum((32, 5), "abc,cd->abd", **k),
    "linen/Einsum without a bias": lambda **k: linen.Einsum((32, 5), "...c,cd->...d", False, **k),
    "linen/Conv": lambda **k: linen.Conv(8, (3,), **k),
    "linen/Conv, strided": lambda **k: linen.Conv(
        8, (3,), 2, "CAUSAL", kernel_dilation=2, feature_group_count=2, use_bias=False, **k
    ),
    "nnx/Linear": of_nnx("Linear", 32, 8),
    "nnx/Linear without a bias": of_nnx("Linear", 32, 8, use_bias=False),
    "nnx/LinearGeneral": of_nnx("LinearGeneral", (16, 32), (2, 4), axis=(-2, -1)),
    "nnx/Einsum": of_nnx("Einsum", "abc,cd->abd", (32, 5), (5,)),
    "nnx/Conv": of_nnx("Conv", 32, 8, (3,)),
    "nnx/Conv, circular": of_nnx("Conv", 32, 8, (3,), padding="CIRCULAR"),
}
ATTENTION: dict[str, Callable[..., Any]] = {
    "linen/attention": lambda **k: linen.MultiHeadDotProductAttention(4, **k),
    "nnx/attention": of_nnx("MultiHeadAttention", 4, 32, decode=False),
}


def attention(width: int) -> Any:
    return layer(
        lambda nn: nn.MultiHeadDotProductAttention(4),
        lambda nnx, rngs: nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs),
    )


def net(self: Any, x: Any) -> Any:
    x = self.stem(self.conv(x))
    return self.head(jax.nn.relu(x + self.mix(self.norm(x))))


NET = Text(
    net,
    "Net",
    conv=layer(lambda nn: nn.Conv(32, (3,)), lambda nnx, rngs: nnx.Conv(32, 32, (3,), rngs=rngs)),
    stem=dense(32, 64),
    norm=layer_norm(64),
    mix=attention(64),
    head=dense(64, 8),
)


def dots(function: Any, *args: Any) -> collections.Counter[tuple[str, ...]]:
    """Returns the dtypes of both operands of each matmul and convolution of a program."""
    found = named(operations(function, *args), "dot_general", "conv_general_dilated")
    return collections.Counter(op.inputs for op in found)


def loss_of(layer: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """Returns a function of params and an input, and the params."""
    if isinstance(layer, flax_nnx.Module):
        graphdef, params = flax_nnx.split(layer, flax_nnx.Param)
        return lambda p, x: flax_nnx.merge(graphdef, p)(x), params
    return lambda p, x: layer.apply(p, x), layer.init(jax.random.key(0), X)


def squared(run: Any) -> Callable[[Any, Any], Any]:
    return lambda p, x: (run(p, x).astype(jnp.float32) ** 2).sum()


def error(found: Any, truth: Any) -> float:
    found, truth = (np.asarray(a, np.float64).ravel() for a in (found, truth))
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("text", EIGHT)
def test_a_layer_multiplies_three_times_in_8_bits_and_is_near_float32(text, name):
    results = []
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for policy_text in (text, "float32"):
        with use_policy(policy_text):
            run, params = loss_of(LAYERS[name]())
            grads = jax.grad(squared(run), (0, 1))
            results.append((run(params, X), *jax.tree.leaves(grads(params, X))))
            if policy_text == text:
                seen = dots(grads, params, X)
    operands, cotangents = EIGHT[text]
    if "Conv" in name:  # JAX convolves no two dtypes
        cotangents = operands
    expected = collections.Counter({(operands, operands): 1})
    expected[cotangents, operands] += 2
    assert seen == expected
    for ours, truth in zip(*results, strict=True):
        assert error(ours, truth) < (0.12 if text == "mixed_float8" else 0.04)


@pytest.mark.parametrize("name", ["linen/Dense", "linen/Conv", "nnx/Linear", "nnx/Conv"])
def test_a_boundary_hands_on_the_accumulator(name):
    run, params = loss_of(LAYERS[name](dtype_policy="p=f32,c=bf16,o=f32,m=i8"))
    y = run(params, X)
    assert y.dtype == jnp.float32
    assert not jnp.array_equal(y, y.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_projects_in_8_bits_and_quantises_its_input_once(name):
    with use_policy("mixed_float8"):
        run, params = loss_of(ATTENTION[name]())
        seen = dots(run, params, X)
        jaxpr = jax.make_jaxpr(run)(params, X)
    assert seen == {("float8_e4m3fn", "float8_e4m3fn"): 4, HALF: 2}
    casts = [
        equation.outvars[0].aval.shape
        for equation in jaxpr.eqns
        if equation.primitive.name == "convert_element_type"
        and equation.outvars[0].aval.dtype == jnp.float8_e4m3fn
    ]
    assert casts.count(X.shape) == 1 and len(casts) == 6  # of four weights, x, and the mixed values


@BOTH
@pytest.mark.parametrize("way", ["autocast", "apply_policy"])
def test_rules_keep_layers_out_of_code_that_knows_no_policy(wing, way):
    plain, rules = wing.theirs(NET, X), {"stem|head": KEPT}
    if way == "autocast":
        model, run = plain, policy.autocast(plain.pure, "mixed_int8", params=0, rules=rules)
        whole = policy.autocast(plain.pure, "mixed_int8", params=0)
        assert dots(whole, plain.params, X) == {("int8", "int8"): 7, HALF: 2}
        if wing.name == "nnx":
            return  # a state has no names of modules
        assert dots(run, model.params, X) == {("int8", "int8"): 5, HALF: 4}
    else:
        model = wing.port(NET, "mixed_int8", rules | {wing.flax.Conv: KEPT}, X)
        run = model.pure
        assert dots(run, model.params, X) == {("int8", "int8"): 4, HALF: 5}
    gradients = jax.grad(squared(run))(model.params, X)
    truth = jax.grad(squared(plain.pure))(plain.params, X)
    for ours, true in zip(*map(jax.tree.leaves, (gradients, truth)), strict=True):
        assert ours.dtype == jnp.float32
        if jnp.linalg.norm(true) > 1e-3:  # a key's bias has none
            assert error(ours, true) < 0.1


def test_a_gradient_that_autocast_rewrites_multiplies_forward_alone_in_8_bits():
    plain = WINGS["linen"].theirs(NET, X)
    gradient = jax.grad(lambda p: squared(plain.pure)(p, X))
    inside = dots(policy.autocast(gradient, "mixed_int8", params=0), plain.params)
    assert inside["int8", "int8"] == 7
    assert set(inside) == {("int8", "int8"), HALF}


def own(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


OUT: dict[str, tuple[Any, Any, str]] = {
    "an operation of the user's": ({"dot_general": own}, None, "bfloat16"),
    "an explicit dtype": ({"dtype": jnp.float32}, None, "float32"),
    "an island": ({}, policy.full_precision(), "float32"),
}


@pytest.mark.parametrize("name", ["linen/Dense", "nnx/Linear"])
@pytest.mark.parametrize("how", OUT)
def test_a_layer_is_kept_out_by(how, name):
    options, block, dtype = OUT[how]
    with use_policy("mixed_float8"):
        run, params = loss_of(LAYERS[name](**options))
        with block or contextlib.nullcontext():
            assert dots(run, params, X) == {(dtype, dtype): 1}


def test_transposed_and_local_convolutions_stay_in_compute_dtype():
    for stays in (linen.ConvTranspose(4, (3,)), linen.ConvLocal(4, (3,))):
        with use_policy("mixed_float8"):
            run, params = loss_of(stays)
            assert set(dots(run, params, X)) == {HALF}


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return linen.Dense(32)(x), None


def linen_blocks() -> Any:
    block = linen.scan(
        linen.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )()
    params = block.init(jax.random.key(0), X, None)
    return lambda p: block.apply(p, X, None)[0].astype(jnp.float32).sum(), params


def nnx_blocks() -> Any:
    rngs = flax_nnx.Rngs(0).split(2)
    layers = flax_nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))(rngs)
    graphdef, params = flax_nnx.split(layers)

    def loss(p: Any) -> Any:
        def body(x: Any, one: Any) -> Any:
            run = jax.checkpoint(lambda x, one: flax_nnx.merge(graphdef, one)(x))
            return run(x, one).astype(x.dtype), None

        return lax.scan(body, X, p)[0].sum()

    return loss, params


@pytest.mark.parametrize("blocks", [linen_blocks, nnx_blocks])
def test_scanned_and_rematerialised_layers_multiply_in_8_bits(blocks):
    with use_policy("mixed_int8"):
        loss, params = blocks()
        seen, leaves = dots(jax.grad(loss), params), jax.tree.leaves(jax.grad(loss)(params))
    assert seen == {("int8", "int8"): 3}  # a product is not recomputed
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


# --- arrays that vary by device -------------------------------------------------------------------

SMALL = [LAYERS[name] for name in ("linen/Dense", "linen/Conv", "nnx/Linear", "nnx/Conv")]


@pytest.mark.parametrize(
    "policy", ["mixed_int8", "mixed_float8", "p=f32,c=bf16,o=f32,m=i8:compute"]
)
@pytest.mark.parametrize("made", [*SMALL, *ATTENTION.values()])
def test_gradients_of_replicated_params_inside_of_shard_map_are_those_outside(made, policy):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    by_data = PartitionSpec("data")
    with use_policy(policy):
        run, params = loss_of(made())
        loss = squared(run)

        def mapped(params: Any, x: jax.Array) -> Any:
            mean = lambda *args: jax.lax.pmean(loss(*args), "data")  # noqa: E731
            return jax.grad(mean, argnums=(0, 1))(params, x)

        specs = (PartitionSpec(), by_data)
        inside = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs)(params, X)
        outside = jax.grad(loss, argnums=(0, 1))(params, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), inside, outside
    )


@pytest.mark.parametrize("policy", ["mixed_int8", "mixed_float8"])
@pytest.mark.parametrize("made", SMALL)
def test_large_inputs_times_small_weights_are_finite(made, policy):
    with use_policy(policy):
        apply, params = loss_of(made())
        # powers of two: the codes are the same
        small = jax.tree.map(lambda x: 2.0**-13 * x, params)
        large = apply(small, 2.0**123 * X)
        expected = 2.0**110 * np.asarray(apply(params, X), np.float32)
    assert np.abs(X).max() * 2.0**123 > 1e37
    np.testing.assert_allclose(np.asarray(large, np.float32), expected, rtol=1e-6)
