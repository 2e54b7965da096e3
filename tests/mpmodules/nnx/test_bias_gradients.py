"""The gradients of biases: summed in float32, returned in param_dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import Policy, get_policy, use_policy

ROWS, GRID = (3, 5, 4), (2, 6, 6, 4)
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
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


def build(name, layers, **kwargs):
    return CASES[name][0](layers, rngs=flax_nnx.Rngs(0), **kwargs)


def gradient(layer, x, weights):
    graphdef, state = flax_nnx.split(layer)

    def loss(state):
        return jnp.sum(flax_nnx.merge(graphdef, state)(x).astype(jnp.float32) * weights)

    return jax.grad(loss)(state)["bias"][...]


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16"))
@pytest.mark.parametrize("name", CASES)
def test_a_bias_gradient_is_summed_in_float32(name, policy):
    policy = get_policy(policy)
    x = jax.random.normal(jax.random.key(0), CASES[name][1])
    exact = build(name, flax_nnx)
    weights = 1 + jax.random.uniform(jax.random.key(0), exact(x).shape)
    rounded = weights.astype(policy.compute_dtype).astype(
        jnp.float32
    )  # the cotangent that arrives is half
    expected = gradient(exact, x, rounded)
    with use_policy(policy):
        layer = build(name, nnx)
    bias = gradient(layer, x, weights)
    assert bias.dtype == policy.param_dtype
    eps = float(jnp.finfo(policy.param_dtype).eps)
    np.testing.assert_allclose(
        np.asarray(bias, np.float32), expected, rtol=2 * eps if eps > 1e-6 else 1e-5
    )
    text = str(jax.make_jaxpr(lambda x: gradient(layer, x, weights))(x))
    sums = [line for line in text.splitlines() if "= reduce_sum" in line]
    assert sums and all(":f32" in line.split("=")[0] for line in sums)


def test_upstreams_bias_gradient_is_rounded_to_half():
    x, weights = jnp.zeros((4097, 1)), jnp.ones((4097, 1))
    ours, theirs = (
        wing.Linear(1, 1, dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(0)) for wing in (nnx, flax_nnx)
    )
    if float(gradient(theirs, x, weights)[0]) == 4097:
        pytest.skip("this Flax sums it in float32")
    assert float(gradient(ours, x, weights)[0]) == 4097


def test_a_bias_gradient_beyond_float16_is_finite():
    layer = nnx.Linear(1, 1, rngs=flax_nnx.Rngs(0), dtype_policy=Policy("f32", "f16", "f16"))
    assert float(gradient(layer, jnp.zeros((70000, 1)), jnp.ones((70000, 1)))[0]) == 70000


@pytest.mark.parametrize("name", CASES)
def test_the_forward_program_is_upstreams(name):
    x = jnp.zeros(CASES[name][1], jnp.bfloat16)
    half = {"dtype": jnp.bfloat16} | ({"lora_dtype": jnp.bfloat16} if name == "LoRALinear" else {})

    def program(layers):
        graphdef, state = flax_nnx.split(build(name, layers, **half))
        return (
            jax.jit(lambda state, x: flax_nnx.merge(graphdef, state)(x)).lower(state, x).as_text()
        )

    assert program(nnx) == program(flax_nnx)
