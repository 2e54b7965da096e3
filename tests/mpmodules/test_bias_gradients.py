"""The gradients of biases, and of the scales and biases of norms: summed in float32, returned in
param_dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import get_policy, use_policy
from tests.programs import frozen_biases, named, operations

KEY = jax.random.key(0)
ROWS, GRID = (3, 5, 4), (2, 6, 6, 4)
OURS: dict[str, Any] = {"linen": linen, "nnx": nnx}
THEIRS: dict[str, Any] = {"linen": flax.linen, "nnx": flax.nnx}
EACH_WING = pytest.mark.parametrize("wing", OURS)

# What makes a layer of a module of layers, and the shape of its input.
LINEN: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Dense": (lambda nn, **kw: nn.Dense(6, **kw), ROWS),
    "DenseGeneral": (lambda nn, **kw: nn.DenseGeneral((2, 3), **kw), ROWS),
    "DenseGeneral batched": (lambda nn, **kw: nn.DenseGeneral((2, 3), batch_dims=(0,), **kw), ROWS),
    "Einsum": (lambda nn, **kw: nn.Einsum((4, 6), "abc,cd->abd", **kw), ROWS),
    "Einsum apart": (lambda nn, **kw: nn.Einsum((4, 5), "a b c, c d -> d a b", **kw), ROWS),
    "Conv": (lambda nn, **kw: nn.Conv(6, (3, 3), **kw), GRID),
    "Conv of one image": (lambda nn, **kw: nn.Conv(6, (3, 3), **kw), GRID[1:]),
    "Conv of batches": (lambda nn, **kw: nn.Conv(6, (3, 3), **kw), (2, *GRID)),
    "ConvLocal": (lambda nn, **kw: nn.ConvLocal(2, (3, 3), **kw), GRID),
    "ConvTranspose": (lambda nn, **kw: nn.ConvTranspose(6, (3, 3), strides=(2, 2), **kw), GRID),
}
NNX: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Linear": (lambda nn, **kw: nn.Linear(4, 6, **kw), ROWS),
    "LinearGeneral": (lambda nn, **kw: nn.LinearGeneral(4, (2, 3), **kw), ROWS),
    "LinearGeneral batched": (
        lambda nn, **kw: nn.LinearGeneral(4, (2, 3), batch_axis={0: 3}, **kw),
        ROWS,
    ),
    "Einsum": (lambda nn, **kw: nn.Einsum("abc,cd->abd", (4, 6), (6,), **kw), ROWS),
    "Einsum apart": (lambda nn, **kw: nn.Einsum("a b c, c d -> d a b", (4, 5), (5,), **kw), ROWS),
    "Conv": (lambda nn, **kw: nn.Conv(4, 6, (3, 3), **kw), GRID),
    "Conv of one image": (lambda nn, **kw: nn.Conv(4, 6, (3, 3), **kw), GRID[1:]),
    "ConvTranspose": (lambda nn, **kw: nn.ConvTranspose(4, 6, (3, 3), strides=(2, 2), **kw), GRID),
    "LoRALinear": (lambda nn, **kw: nn.LoRALinear(4, 6, lora_rank=2, **kw), ROWS),
}
CASES = {("linen", name): case for name, case in LINEN.items()}
CASES |= {("nnx", name): case for name, case in NNX.items()}
EACH_LAYER = pytest.mark.parametrize(("wing", "name"), CASES)


def pure(wing: str, make: Any, layers: Any, x: Any, **options: Any) -> tuple[Callable, Any]:
    """Returns a layer as a function of its parameters and input, and its parameters."""
    if wing == "linen":
        layer = make(layers[wing], **options)
        return layer.apply, layer.init(KEY, jnp.zeros(x.shape))
    graph, params = flax.nnx.split(make(layers[wing], rngs=flax.nnx.Rngs(0), **options))
    return lambda params, x: flax.nnx.merge(graph, params, copy=True)(x), params


def gradient(run: Callable, params: Any, x: jax.Array, weights: jax.Array) -> dict[str, Any]:
    """Returns the gradients of a weighted sum of the outputs, by the parameters' last names."""
    total = lambda params: jnp.sum(run(params, x).astype(jnp.float32) * weights)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(jax.grad(total)(params))
    return {[key.key for key in path if hasattr(key, "key")][-1]: leaf for path, leaf in leaves}


@pytest.mark.parametrize("text", ("mixed_bfloat16", "mixed_float16", "bfloat16"))
@EACH_LAYER
def test_a_bias_gradient_is_summed_in_float32(wing, name, text):
    (make, shape), policy = CASES[wing, name], get_policy(text)
    x = jax.random.normal(KEY, shape)
    exact, params = pure(wing, make, THEIRS, x)
    weights = 1 + jax.random.uniform(KEY, exact(params, x).shape)
    # the cotangent that arrives is half
    rounded = weights.astype(policy.compute_dtype).astype(jnp.float32)
    expected = gradient(exact, params, x, rounded)["bias"]
    with use_policy(policy):
        run, params = pure(wing, make, OURS, x)
        found = gradient(run, params, x, weights)["bias"]
        ops = operations(lambda p: gradient(run, p, x, weights), params)
    assert found.dtype == policy.param_dtype
    eps = float(jnp.finfo(policy.param_dtype).eps)
    tolerance = 2 * eps if eps > 1e-6 else 1e-5
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=tolerance)
    assert {op.inputs[0] for op in named(ops, "reduce_sum")} == {"float32"}


def one_feature(wing: str) -> Any:
    sizes = {"linen": ("Dense", 1), "nnx": ("Linear", 1, 1)}[wing]
    return lambda nn, **options: getattr(nn, sizes[0])(*sizes[1:], **options)


@EACH_WING
def test_upstreams_bias_gradient_is_rounded_to_half(wing):
    x, weights = jnp.zeros((4097, 1)), jnp.ones((4097, 1))
    theirs, ours = (
        gradient(*pure(wing, one_feature(wing), layers, x, dtype=jnp.bfloat16), x, weights)
        for layers in (THEIRS, OURS)
    )
    if float(theirs["bias"][0]) == 4097:
        pytest.skip("this Flax sums it in float32")
    assert float(ours["bias"][0]) == 4097


@EACH_WING
def test_a_bias_gradient_beyond_float16_is_finite(wing):
    x, weights = jnp.zeros((70000, 1)), jnp.ones((70000, 1))
    run, params = pure(wing, one_feature(wing), OURS, x, dtype_policy="p=f32,c=f16,o=f16")
    assert float(gradient(run, params, x, weights)["bias"][0]) == 70000


@EACH_LAYER
def test_but_for_biases_an_explicit_half_dtype_gives_upstreams_program(wing, name):
    make, shape = CASES[wing, name]
    half = {"dtype": jnp.bfloat16} | ({"lora_dtype": jnp.bfloat16} if name == "LoRALinear" else {})

    def program(layers: Any) -> str:
        x = jnp.zeros(shape, jnp.bfloat16)
        run, params = pure(wing, make, layers, x, **half)
        loss = lambda p, x: jnp.square(run(frozen_biases(p), x).astype(jnp.float32)).sum()  # noqa: E731
        both = lambda p, x: (run(p, x), jax.grad(loss, (0, 1))(p, x))  # noqa: E731
        return jax.jit(both).lower(params, x).as_text()

    assert program(OURS) == program(THEIRS)


def test_backward_keeps_nothing_for_a_bias():
    x = jnp.zeros((8, 4), jnp.bfloat16)
    for layers in (OURS, THEIRS):
        run, params = pure("linen", LINEN["Dense"][0], layers, x, dtype=jnp.bfloat16)
        _, backward = jax.vjp(run, params, x)
        kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size > 1]
        assert sorted((leaf.dtype.name, leaf.shape) for leaf in kept) == [
            ("bfloat16", (4, 6)),
            ("bfloat16", (8, 4)),
        ]


def test_forward_mode_and_vmap_agree_with_upstream():
    x = jax.random.normal(KEY, (3, 4)).astype(jnp.bfloat16)
    found = []
    for layers in (OURS, THEIRS):
        run, params = pure("linen", LINEN["Dense"][0], layers, x, dtype=jnp.bfloat16)
        rows = lambda p, run=run: jax.vmap(lambda x: run(p, x))(x)  # noqa: E731
        found.append(jax.jvp(rows, (params,), (params,)))
    jax.tree.map(np.testing.assert_array_equal, *found)


NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "BatchNorm": {"use_running_average": True},
}


@pytest.mark.parametrize("name", NORMS)
def test_the_gradients_of_a_norms_scale_and_bias_are_summed_in_float32(name):
    make = lambda nn: getattr(nn, name)(**NORMS[name])  # noqa: E731
    x = jax.random.normal(KEY, (64, 8, 4)).astype(jnp.bfloat16)
    with use_policy("mixed_bfloat16"):
        run, variables = pure("linen", make, OURS, x)
        rest = {key: value for key, value in variables.items() if key != "params"}
        of_params = lambda p, x: run({**p, **rest}, x)  # noqa: E731
        params, weights = {"params": variables["params"]}, jnp.ones(x.shape)
        ops = operations(lambda p: gradient(of_params, p, x, weights), params)
        found = gradient(of_params, params, x, weights)
    assert {op.inputs[0] for op in named(ops, "reduce_sum")} == {"float32"}
    assert {leaf.dtype.name for leaf in found.values()} == {"float32"}
    if "bias" in found:
        np.testing.assert_array_equal(found["bias"], 512)
