"""The gradients of biases, and of the scales and biases of norms: summed in float32, returned in
param_dtype.
"""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from policy import Policy, get_policy, use_policy
from tests.programs import operations

KEY = jax.random.key(0)
ROWS, GRID = (3, 5, 4), (2, 6, 6, 4)
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
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
NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm")


def gradient(layer, variables, x, weights):
    def loss(variables):
        y: Any = layer.apply(variables, x)
        return jnp.sum(y.astype(jnp.float32) * weights)

    return jax.grad(loss)(variables)["params"]


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16"))
@pytest.mark.parametrize("name", CASES)
def test_a_bias_gradient_is_summed_in_float32(name, policy):
    make, shape = CASES[name]
    policy, layer = get_policy(policy), make(nn)
    x = jax.random.normal(KEY, shape)
    exact: Any = make(flax_nn).init_with_output(KEY, x)
    weights = 1 + jax.random.uniform(KEY, exact[0].shape)
    rounded = weights.astype(policy.compute_dtype).astype(
        jnp.float32
    )  # the cotangent that arrives is half
    expected = gradient(make(flax_nn), exact[1], x, rounded)["bias"]
    variables = jax.tree.map(lambda leaf: leaf.astype(policy.param_dtype), exact[1])
    with use_policy(policy):
        bias = gradient(layer, variables, x, weights)["bias"]
        sums = [
            op
            for op in operations(lambda v: gradient(layer, v, x, weights), variables)
            if op.name == "reduce_sum"
        ]
    assert bias.dtype == policy.param_dtype
    eps = float(jnp.finfo(policy.param_dtype).eps)
    np.testing.assert_allclose(
        np.asarray(bias, np.float32), expected, rtol=2 * eps if eps > 1e-6 else 1e-5
    )
    assert {op.inputs[0] for op in sums} == {"float32"}


def test_upstreams_bias_gradient_is_rounded_to_half():
    x, weights = jnp.zeros((4097, 1)), jnp.ones((4097, 1))
    variables: Any = flax_nn.Dense(1, dtype=jnp.bfloat16).init(KEY, x)
    figure = float(gradient(flax_nn.Dense(1, dtype=jnp.bfloat16), variables, x, weights)["bias"][0])
    if figure == 4097:
        pytest.skip("this Flax sums it in float32")
    assert (
        float(gradient(nn.Dense(1, dtype=jnp.bfloat16), variables, x, weights)["bias"][0]) == 4097
    )


def test_a_bias_gradient_beyond_float16_is_finite():
    x, weights = jnp.zeros((70000, 1)), jnp.ones((70000, 1))
    layer = nn.Dense(1, dtype_policy=Policy("f32", "f16", "f16"))
    variables = layer.init(KEY, x)
    assert float(gradient(layer, variables, x, weights)["bias"][0]) == 70000


@pytest.mark.parametrize("name", CASES)
def test_the_forward_program_is_upstreams(name):
    make, shape = CASES[name]
    x = jnp.zeros(shape, jnp.bfloat16)
    ours, theirs = (make(wing, dtype=jnp.bfloat16) for wing in (nn, flax_nn))
    variables: Any = jax.eval_shape(theirs.init, KEY, x)
    program, expected = (
        jax.jit(lambda v, x, m=m: m.apply(v, x)).lower(variables, x).as_text()
        for m in (ours, theirs)
    )
    assert program == expected


def test_backward_keeps_nothing_for_a_bias():
    x = jnp.zeros((8, 4), jnp.bfloat16)
    variables: Any = flax_nn.Dense(6).init(KEY, jnp.zeros((8, 4)))
    for layers in (nn, flax_nn):
        _, backward = jax.vjp(
            lambda v, x, layers=layers: layers.Dense(6, dtype=jnp.bfloat16).apply(v, x),
            variables,
            x,
        )
        kept = sorted(
            (str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(backward) if leaf.size > 1
        )
        assert kept == [("bfloat16", (4, 6)), ("bfloat16", (8, 4))]


def test_forward_mode_and_vmap_agree_with_upstream():
    x = jax.random.normal(KEY, (3, 4)).astype(jnp.bfloat16)
    variables: Any = flax_nn.Dense(6).init(KEY, jnp.zeros((3, 4)))
    ours, theirs = (
        jax.jvp(lambda v, m=m: jax.vmap(lambda x: m.apply(v, x))(x), (variables,), (variables,))
        for m in (nn.Dense(6, dtype=jnp.bfloat16), flax_nn.Dense(6, dtype=jnp.bfloat16))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", NORMS)
def test_the_gradients_of_a_norms_scale_and_bias_are_summed_in_float32(name):
    extra: dict[str, Any] = {
        "GroupNorm": {"num_groups": 2},
        "BatchNorm": {"use_running_average": True},
    }.get(name, {})
    layer = getattr(nn, name)(**extra)
    x = jax.random.normal(KEY, (64, 8, 4)).astype(jnp.bfloat16)
    with use_policy("mixed_bfloat16"):
        variables = layer.init(KEY, x)
        weights = jnp.ones(x.shape)
        ops = operations(lambda v: gradient(layer, v, x, weights), variables)
        found = gradient(layer, variables, x, weights)
    assert {op.inputs[0] for op in ops if op.name == "reduce_sum"} == {"float32"}
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    if "bias" in found:
        np.testing.assert_array_equal(found["bias"], 512)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_the_gradient_of_a_half_table_is_summed_in_float32_and_rounded_once(dtype):
    tokens = jnp.zeros(1025, jnp.int32)
    layer = nn.Embed(2, 1, dtype_policy=Policy(dtype, dtype, dtype))
    variables = layer.init(KEY, tokens)

    def loss(variables):
        y: Any = layer.apply(variables, tokens)
        return jnp.sum(y.astype(jnp.float32))

    found = jax.grad(loss)(variables)["params"]["embedding"]
    assert found.dtype == dtype and float(found[0, 0]) == float(jnp.asarray(1025, dtype))
    assert {
        op.inputs[0] for op in operations(jax.grad(loss), variables) if op.name == "scatter-add"
    } == {"float32"}
