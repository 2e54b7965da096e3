"""Half-precision parameters: gradients that are summed in float32 all the same, and initialisers
that run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, use_policy

CELLS = [
    ("linen", "SimpleCell"),
    ("linen", "LSTMCell"),
    ("linen", "OptimizedLSTMCell"),
    ("nnx", "GRUCell"),
]
ORTHOGONAL = jax.nn.initializers.orthogonal()
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300, 4)), jnp.float32)
KEY = jax.random.key(0)


def gradients(wing: str, cell: str, policy: str, params: Any = None) -> Any:
    """The gradients of an RNN's mean output, by leaf, and the parameters used."""
    with use_policy(policy):
        if wing == "linen":
            model: Any = linen.RNN(getattr(linen, cell)(3))
            params = model.init(KEY, X) if params is None else params
            apply = model.apply
        else:
            rnn = nnx.RNN(getattr(nnx, cell)(4, 3, rngs=flax_nnx.Rngs(0)))
            graph, own, rest = flax_nnx.split(rnn, flax_nnx.Param, ...)
            params = own if params is None else params
            apply = lambda params, x: flax_nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
        return jax.jit(jax.grad(lambda p: apply(p, X).astype(jnp.float32).mean()))(params), params


@pytest.mark.parametrize(("wing", "cell"), CELLS)
def test_a_half_recurrent_weights_gradient_is_summed_over_the_steps_in_float32(wing, cell):
    _, params = gradients(wing, cell, "bfloat16")
    found, _ = gradients(wing, cell, "bfloat16", params)
    wide, _ = gradients(
        wing, cell, "mixed_bfloat16", jax.tree.map(lambda x: x.astype(jnp.float32), params)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"bfloat16"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wide), strict=True):
        # one rounding; summed in half over 300 steps it is 3% to 6% off
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2.0**-8, atol=1e-6)


def test_an_optimized_lstms_biases_have_an_lstms_gradients():
    found, params = gradients("linen", "OptimizedLSTMCell", "mixed_bfloat16")
    expected, _ = gradients("linen", "LSTMCell", "mixed_bfloat16", params)
    for gate in ("hi", "hf", "hg", "ho"):
        a, b = (tree["params"]["cell"][gate]["bias"] for tree in (found, expected))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.01 * float(jnp.abs(b).max()))
        assert float(jnp.abs(b).max()) > 0


@pytest.mark.parametrize("policy", ("bfloat16", "float16"))
def test_an_initialiser_that_fails_in_half_runs_in_float32(policy):
    x = jnp.ones((2, 3, 4))
    with use_policy(policy):
        trees = [
            linen.Dense(4, kernel_init=ORTHOGONAL).init(KEY, x),
            linen.Dense(4, kernel_init=linen.with_partitioning(ORTHOGONAL, ("a", "b"))).init(
                KEY, x
            ),
            linen.Embed(4, 4, embedding_init=ORTHOGONAL).init(KEY, jnp.zeros(2, int)),
            linen.MultiHeadDotProductAttention(2, kernel_init=ORTHOGONAL).init(KEY, x),
            flax_nnx.state(nnx.Linear(4, 4, kernel_init=ORTHOGONAL, rngs=flax_nnx.Rngs(0))),
            flax_nnx.state(nnx.LoRA(4, 2, 4, a_initializer=ORTHOGONAL, rngs=flax_nnx.Rngs(0))),
        ]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trees)} == {policy}
    kernel: Any = trees[0]
    np.testing.assert_array_equal(kernel["params"]["kernel"], rounded_orthogonal(policy))


def rounded_orthogonal(policy: str) -> Any:
    """Returns Flax's orthogonal matrix of float32, rounded."""
    kernel: Any = linen.Dense(4, kernel_init=ORTHOGONAL).init(KEY, jnp.ones((2, 3, 4)))
    return kernel["params"]["kernel"].astype(policy)


def test_an_nnx_layer_with_a_dtype_of_its_own_is_quiet_in_the_scope_that_it_was_built_in():
    with use_policy("mixed_bfloat16"):
        with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
            layer = nnx.Linear(4, 3, dtype=jnp.float32, rngs=flax_nnx.Rngs(0))
        layer(X[0])  # warnings are errors
    with use_policy("float16"), pytest.warns(DtypePolicyWarning, match="changes no nnx layer"):
        layer(X[0])


@pytest.mark.parametrize("own_code", ["autocast", "keep"])
def test_an_nnx_scan_whose_body_changes_its_carrys_dtype_is_explained_where_code_is_kept(own_code):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(rngs, dtype_policy="mixed_bfloat16")  # pyright: ignore[reportCallIssue]

        def __call__(self, x):
            body = lambda block, x, _: (block(x), None)  # noqa: E731
            return flax_nnx.scan(body, in_axes=(None, flax_nnx.Carry, 0))(
                self.block, x, jnp.arange(2)
            )[0]

    Model.own_code = Block.own_code = own_code  # pyright: ignore[reportAttributeAccessIssue]
    model: Any = Model(flax_nnx.Rngs(0), dtype_policy="bfloat16")  # pyright: ignore[reportCallIssue]
    if own_code == "autocast":
        assert model(X[0]).dtype == jnp.bfloat16  # the carry is float32 to the code
        return
    with pytest.raises(TypeError, match="carry") as caught:
        model(X[0])
    assert any(
        "a policy of their own and cast their outputs: 'Block' (returns float32 by argument "
        "dtype_policy)"
        in note
        and "lift its class" not in note
        for note in caught.value.__notes__
    )
