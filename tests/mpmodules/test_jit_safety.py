"""Models under jit and other transforms of JAX follow the policy in force."""

from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import use_policy
from tests.mpmodules.apis import BOTH, MIXED, Text, dense

A, B = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
ABA = ((A, "bfloat16"), (B, "float16"), (A, "bfloat16"))
X = jnp.ones((2, 4))
NET = Text(lambda self, x: self.layer(x), layer=dense(4, 4))


def forward(api: Any) -> Callable[[Any], Any]:
    """Returns a function that builds what it calls in its scope."""
    if api.name == "nnx":
        return lambda x: NET.nnx_class(api.module)(rngs=api.module.Rngs(0))(x)
    model = NET.linen_class(api.module)()
    variables = model.init(jax.random.key(0), X)
    return lambda x: model.apply(variables, x)


@pytest.mark.slow
@BOTH
def test_ports_by_different_policies_are_traced_apart_by_flaxs_jit(api):
    """Flax's interceptors are no part of its jit key; the scope that a port enters is."""
    traces: list[Any] = []

    @flax.nnx.jit
    def forward(model, x):
        traces.append(None)
        return model(x)

    for policy, expected in ABA:
        if api.name == "nnx":
            layer = flax.nnx.Linear(4, 4, rngs=flax.nnx.Rngs(0))
            out = forward(api.module.apply_policy(layer, policy), X)
        else:
            jitted = flax.linen.Sequential([flax.linen.jit(flax.linen.Dense)(3)])
            port = api.module.apply_policy(jitted, policy)
            out, _ = port.init_with_output(jax.random.key(0), X)
        assert out.dtype == expected
    assert len(traces) == (2 if api.name == "nnx" else 0)


# A scan's carry stays float32, and its stacked output has the policy's dtype.
TRANSFORMS: dict[str, Any] = {
    "none": lambda run: run,
    "scan": lambda run: lambda x: lax.scan(lambda c, row: (c, run(row)), jnp.zeros(()), x)[1],
    "checkpoint": jax.checkpoint,
    "grad of checkpoint": lambda run: (
        lambda x: jax.value_and_grad(lambda x: jax.checkpoint(run)(x).sum())(x)[0]
    ),
    "vmap": jax.vmap,
    "cond": lambda run: lambda x: lax.cond(x.sum() > 0, run, lambda x: 2 * run(x), x),
}


@pytest.mark.cases(fast=1, slow=4)
@BOTH
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_model_inside_a_jax_transform_follows_the_scope(api, transform):
    jitted = jax.jit(TRANSFORMS[transform](forward(api)))
    for policy, expected in ABA:
        with use_policy(policy):
            assert jitted(X).dtype == expected


@pytest.mark.slow
@BOTH
def test_a_policy_of_the_modules_own_is_that_of_a_step_whose_parameters_are_donated(api):
    model = api.ours(NET, MIXED, X)

    def step(params, x):
        gradients = jax.grad(lambda p: jnp.square(model.pure(p, x)).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    compiled = jax.jit(step, donate_argnums=0).lower(model.params, X)
    assert compiled.as_text().count("tf.aliasing_output") == 2
    assert {leaf.dtype for leaf in jax.tree.leaves(compiled.compile()(model.params, X))} == {
        jnp.dtype("float32")
    }
