"""Layers of both wings under a policy with matmuls in 8 bits: programs, results and gradients."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

import policy
from mpmodules import linen, nnx, use_policy
from policy.programs.equations import equations_within

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 16, 32)), jnp.float32)
EIGHT = {"mixed_float8": ("float8_e4m3fn", "float8_e5m2"), "mixed_int8": ("int8", "int8")}


def rngs() -> flax_nnx.Rngs:
    return flax_nnx.Rngs(0)


LINEN: dict[str, Callable[[], Any]] = {
    "Dense": lambda: linen.Dense(8),
    "Dense without a bias": lambda: linen.Dense(8, use_bias=False),
    "DenseGeneral": lambda: linen.DenseGeneral((2, 4), axis=(-2, -1)),
    "DenseGeneral, batched": lambda: linen.DenseGeneral(4, axis=2, batch_dims=(0,)),
    "Einsum": lambda: linen.Einsum((32, 5), "abc,cd->abd"),
    "Einsum without a bias": lambda: linen.Einsum((32, 5), "...c,cd->...d", use_bias=False),
    "Conv": lambda: linen.Conv(8, (3,)),
    "Conv, strided": lambda: linen.Conv(
        8, (3,), 2, "CAUSAL", kernel_dilation=2, feature_group_count=2, use_bias=False
    ),
}
NNX: dict[str, Callable[[], Any]] = {
    "Linear": lambda: nnx.Linear(32, 8, rngs=rngs()),
    "Linear without a bias": lambda: nnx.Linear(32, 8, use_bias=False, rngs=rngs()),
    "LinearGeneral": lambda: nnx.LinearGeneral((16, 32), (2, 4), axis=(-2, -1), rngs=rngs()),
    "Einsum": lambda: nnx.Einsum("abc,cd->abd", (32, 5), (5,), rngs=rngs()),
    "Conv": lambda: nnx.Conv(32, 8, (3,), rngs=rngs()),
    "Conv, circular": lambda: nnx.Conv(32, 8, (3,), padding="CIRCULAR", rngs=rngs()),
}


def dots(function: Any, *args: Any) -> collections.Counter[tuple[str, ...]]:
    """Returns the dtypes of both operands of each matmul and convolution of a program."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return collections.Counter(
        tuple(str(variable.aval.dtype) for variable in equation.invars)
        for equation in equations_within(jaxpr.jaxpr)
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    )


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


@pytest.mark.parametrize("name", [*(f"linen/{n}" for n in LINEN), *(f"nnx/{n}" for n in NNX)])
@pytest.mark.parametrize("text", EIGHT)
def test_a_layer_multiplies_three_times_in_8_bits_and_is_near_float32(text, name):
    wing, _, kind = name.partition("/")
    make = (LINEN if wing == "linen" else NNX)[kind]
    results = []
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    for policy_text in (text, "float32"):
        with use_policy(policy_text):
            run, params = loss_of(make())
            grads = jax.grad(squared(run), (0, 1))
            results.append((run(params, X), *jax.tree.leaves(grads(params, X))))
            if policy_text == text:
                seen = dots(grads, params, X)
    operands, cotangents = EIGHT[text]
    if "Conv" in kind:  # JAX convolves no two dtypes
        cotangents = operands
    expected = collections.Counter({(operands, operands): 1})
    expected[cotangents, operands] += 2
    assert seen == expected
    for ours, truth in zip(*results, strict=True):
        assert error(ours, truth) < (0.12 if text == "mixed_float8" else 0.04)


BOUNDARIES = {
    "linen/Dense": lambda **policy: linen.Dense(64, **policy),
    "linen/Conv": lambda **policy: linen.Conv(8, (3,), **policy),
    "nnx/Linear": lambda **policy: nnx.Linear(32, 64, rngs=rngs(), **policy),
    "nnx/Conv": lambda **policy: nnx.Conv(32, 8, (3,), rngs=rngs(), **policy),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_boundary_hands_on_the_accumulator(name):
    run, params = loss_of(BOUNDARIES[name](dtype_policy="p=f32,c=bf16,o=f32,m=i8"))
    y = run(params, X)
    assert y.dtype == jnp.float32
    assert not jnp.array_equal(y, y.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_attention_projects_in_8_bits_and_quantises_its_input_once(wing):
    with use_policy("mixed_float8"):
        if wing == "linen":
            layer: Any = linen.MultiHeadDotProductAttention(4)
        else:
            layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs())
        run, params = loss_of(layer)
        seen = dots(run, params, X)
        jaxpr = jax.make_jaxpr(run)(params, X)
    assert seen == {
        ("float8_e4m3fn", "float8_e4m3fn"): 4,
        ("bfloat16", "bfloat16"): 2,
    }
    casts = [
        equation.outvars[0].aval.shape
        for equation in equations_within(jaxpr.jaxpr)
        if equation.primitive.name == "convert_element_type"
        and equation.outvars[0].aval.dtype == jnp.float8_e4m3fn
    ]
    assert casts.count(X.shape) == 1 and len(casts) == 6  # of four weights, x, and the mixed values


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        x = flax.linen.Dense(64, name="stem")(x)
        x = x + flax.linen.MultiHeadDotProductAttention(4)(flax.linen.LayerNorm()(x))
        return flax.linen.Dense(8, name="head")(flax.linen.relu(x))


@pytest.mark.parametrize("way", ["autocast", "apply_policy"])
def test_rules_keep_layers_out_of_code_that_knows_no_policy(way):
    plain: Any = Net().apply
    params = Net().init(jax.random.key(0), X)
    rules = [("head", "p=f32,c=bf16,o=bf16"), ("stem", "p=f32,c=bf16,o=bf16")]
    if way == "autocast":
        run: Any = policy.autocast(Net().apply, "mixed_int8", params=0, rules=rules)
    else:
        run = linen.apply_policy(Net(), "mixed_int8", rules=rules).apply
    seen = dots(run, params, X)
    assert seen == {("int8", "int8"): 4, ("bfloat16", "bfloat16"): 4}
    grads = jax.grad(lambda p: (run(p, X).astype(jnp.float32) ** 2).sum())
    truth = jax.grad(lambda p: (plain(p, X) ** 2).sum())(params)
    for ours, true in zip(*map(jax.tree.leaves, (grads(params), truth)), strict=True):
        assert ours.dtype == jnp.float32
        if jnp.linalg.norm(true) > 1e-3:  # a key's bias has none
            assert error(ours, true) < 0.1


def test_a_gradient_that_autocast_rewrites_multiplies_forward_alone_in_8_bits():
    plain: Any = Net().apply
    params = Net().init(jax.random.key(0), X)
    gradient = jax.grad(lambda p: (plain(p, X) ** 2).sum())
    inside = dots(policy.autocast(gradient, "mixed_int8", params=0), params)
    assert inside["int8", "int8"] == 6
    assert set(inside) == {("int8", "int8"), ("bfloat16", "bfloat16")}


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_operation_of_the_users_stays(wing):
    def own(*args: Any, **kwargs: Any) -> Any:
        return lax.dot_general(*args, **kwargs)

    with use_policy("mixed_int8"):
        if wing == "linen":
            layer: Any = linen.Dense(8, dot_general=own)
        else:
            layer = nnx.Linear(32, 8, dot_general=own, rngs=rngs())
        run, params = loss_of(layer)
        assert dots(run, params, X) == {("bfloat16", "bfloat16"): 1}


def test_transposed_and_local_convolutions_stay_in_compute_dtype():
    for layer in (linen.ConvTranspose(4, (3,)), linen.ConvLocal(4, (3,))):
        with use_policy("mixed_float8"):
            run, params = loss_of(layer)
            assert set(dots(run, params, X)) == {("bfloat16", "bfloat16")}


def test_a_rule_keeps_convolutions_out():
    class Image(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3)(linen.Conv(4, (3,))(x))

    with use_policy("mixed_int8", rules=[(linen.Conv, "p=f32,c=bf16,o=bf16")]):
        run, params = loss_of(Image())
        assert dots(run, params, X) == {("bfloat16", "bfloat16"): 1, ("int8", "int8"): 1}


def test_ports_and_autocast_convolve_in_8_bits():
    model = flax.linen.Conv(8, (3,))
    params = model.init(jax.random.key(0), X)
    plain: Any = model.apply
    truth = jax.grad(lambda p: (plain(p, X) ** 2).sum())(params)
    cast = policy.autocast(model.apply, "mixed_int8", params=0)
    for run in (linen.apply_policy(model, "mixed_int8").apply, cast):
        grads = jax.grad(squared(run))
        assert dots(grads, params, X) == {("int8", "int8"): 3}
        for ours, true in zip(*map(jax.tree.leaves, (grads(params, X), truth)), strict=True):
            assert error(ours, true) < 0.04


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_scanned_and_rematerialised_layers_multiply_in_8_bits(wing):
    with use_policy("mixed_int8"):
        if wing == "linen":
            block = linen.scan(
                linen.remat(LinenBlock),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )()
            params = block.init(jax.random.key(0), X, None)
            grads = jax.grad(lambda p: block.apply(p, X, None)[0].astype(jnp.float32).sum())
        else:
            layers = flax_nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))(
                flax_nnx.Rngs(0).split(2)
            )
            graphdef, params = flax_nnx.split(layers)

            def loss(p: Any) -> Any:
                def body(x: Any, one: Any) -> Any:
                    run = jax.checkpoint(lambda x, one: flax_nnx.merge(graphdef, one)(x))
                    return run(x, one).astype(x.dtype), None

                return lax.scan(body, X, p)[0].sum()

            grads = jax.grad(loss)
        seen = dots(grads, params)
        leaves = jax.tree.leaves(grads(params))
    assert (
        set(seen) == {("int8", "int8")} and sum(seen.values()) == 3
    )  # a product is not recomputed
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return linen.Dense(32)(x), None


@pytest.mark.parametrize("text", EIGHT)
def test_audit_counts_matmuls_in_8_bits_and_finds_nothing(text):
    with use_policy(text):
        layer = linen.Dense(64)
        params = layer.init(jax.random.key(0), X)
        report = policy.audit(layer.apply, params, X, backward=True)
    operands, cotangents = EIGHT[text]
    matmuls = [op for op in report.operations if op.kind == "dot"]
    assert {op.operands for op in matmuls} == {(operands, operands), (cotangents, operands)}
    # forward, and the kernel's gradient
    assert sum(op.flops for op in matmuls) == 2 * 2 * X.size * 64
    assert report.f32_matmul_share == 0 and not report.findings
    short = {"float8_e4m3fn": "f8e4m3 f8e4m3", "int8": "i8 i8"}[operands]
    assert short in str(report)


def test_compare_measures_the_error_of_8_bits_by_module():
    with use_policy("mixed_float8"):
        layer = linen.Dense(64)
        params = layer.init(jax.random.key(0), X)
        rows = policy.compare(layer.apply, params, X).rows
    assert 0.02 < max(row.error for row in rows) < 0.06


@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.parametrize("way", ["island", "dtype"])
def test_an_island_and_an_explicit_dtype_keep_a_layer_out(wing, way):
    options = {"dtype": jnp.float32} if way == "dtype" else {}
    with use_policy("mixed_float8"):
        if wing == "linen":
            layer: Any = linen.Dense(8, name="layer", **options)
        else:
            layer = nnx.Linear(32, 8, rngs=rngs(), **options)
        run, params = loss_of(layer)
        island = policy.full_precision() if way == "island" else contextlib.nullcontext()
        with island:
            assert dots(run, params, X) == {("float32", "float32"): 1}


class FlaxNet(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs):
        self.stem = flax_nnx.Linear(32, 64, rngs=rngs)
        self.mix = flax_nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.head = flax_nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jax.nn.relu(self.mix(self.stem(x))))


def test_an_nnx_model_of_flaxs_multiplies_in_8_bits_where_rules_let_it():
    model = FlaxNet(rngs())
    graphdef, state = flax_nnx.split(model)
    cast = policy.autocast(lambda s, x: flax_nnx.merge(graphdef, s)(x), "mixed_int8", params=0)
    assert dots(cast, state, X) == {("int8", "int8"): 6, ("bfloat16", "bfloat16"): 2}
    model = nnx.apply_policy(model, "mixed_int8", rules=[("head", "p=f32,c=bf16")])
    run, params = loss_of(model)
    assert dots(run, params, X) == {("int8", "int8"): 5, ("bfloat16", "bfloat16"): 3}
