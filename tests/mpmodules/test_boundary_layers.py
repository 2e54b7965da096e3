"""Layers that are a boundary to float32: matmuls return their accumulator."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from tests.mpmodules.table import options as table_options
from tests.mpmodules.table.cases import CASES
from tests.mpmodules.table.running import program
from tests.programs import named, operations

MATMULS = ("Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose")
OPTIONS = ("", "without bias", "in groups", "circular", "transpose_kernel=True", "mask=array")
LAYERS = {
    f"{wing} {case}": (wing, case)
    for wing, case in (*CASES, *table_options.OPTIONS)
    if (case.layer in MATMULS and case.setting in OPTIONS) or str(case) == "Embed attend"
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)
EACH_DENSE = pytest.mark.parametrize("name", ["linen Dense", "nnx Linear"])


def function_of(name: str, modules: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Returns a layer as a function of its params and its input, its params, and an input."""
    run = program(*LAYERS[name], modules, **options)
    params, rest = run.init(jax.random.key(0))
    return lambda params, x: run.apply(params, rest, (x,))[0], params, run.inputs[0]


def dots(function: Any, *args: Any) -> list[tuple[str, ...]]:
    """The dtypes of the operands and the result of every matmul and convolution of a program."""
    found = named(operations(function, *args), "dot_general", "conv_general_dilated")
    return sorted((*op.inputs, *op.outputs) for op in found)


def rounded(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), tree)


@pytest.mark.parametrize("half", ("bfloat16", "float16"))
@EACH_LAYER
def test_a_matmul_layer_returns_its_accumulator_and_goes_back_in_compute_dtype(name, half):
    run, params, x = function_of(name, dtype_policy=f"p=f32,c={half},o=f32")
    assert jax.eval_shape(run, params, x).dtype == jnp.float32
    wide, narrow = (half, half, "float32"), (half, half, half)
    assert dots(run, params, x) == [wide]
    gradient = jax.grad(lambda params, x: jnp.square(run(params, x)).sum(), argnums=(0, 1))
    assert dots(gradient, params, x) == sorted([narrow, narrow, wide])
    found = jax.tree.leaves(jax.eval_shape(gradient, params, x))
    assert {leaf.dtype.name for leaf in found} == {"float32"}
    # an input that needs no gradient costs no matmul
    alone = jax.grad(lambda params: jnp.square(run(params, x)).sum())
    assert len(dots(alone, params)) == 2


@EACH_LAYER
def test_an_accumulator_is_no_rounded_copy_and_its_gradients_are_those_of_float32(name):
    results = []
    for policy in ("mixed_bfloat16", "f32"):
        run, params, x = function_of(name, dtype_policy=policy)
        params, x = rounded(params), rounded(x)
        weights = jax.random.normal(jax.random.key(4), jax.eval_shape(run, params, x).shape)

        def loss(params: Any, x: Any, run: Any = run, weights: Any = weights) -> Any:
            return jnp.sum(run(params, x) * weights)

        results.append((run(params, x), jax.grad(loss, argnums=(0, 1))(params, x)))
    (out, gradients), (exact, truth) = results
    assert not np.array_equal(out, rounded(out))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-7 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    "layer", [flax.linen.Einsum((4, 3), "ab,bc->ac"), flax.linen.ConvTranspose(3, (3,))]
)
def test_a_port_of_a_layer_returns_its_accumulator_too(layer):
    ported, x = linen.apply_policy(layer, "mixed_bfloat16"), jnp.ones((2, 4))
    params = ported.init(jax.random.key(0), x)
    wide, narrow = ("bfloat16", "bfloat16", "float32"), ("bfloat16",) * 3
    gradient = jax.grad(lambda params, x: ported.apply(params, x).sum(), (0, 1))
    assert dots(gradient, params, x) == sorted([narrow, narrow, wide])


def test_a_forward_mode_derivative_of_an_accumulator_works():
    run, params, x = function_of("linen Dense", dtype_policy="mixed_bfloat16")
    out, tangent = jax.jvp(lambda x: run(params, x), (x,), (x,))
    assert (out.dtype, tangent.dtype) == (jnp.float32, jnp.float32)
    # The layer is linear, but for its bias of zeros; the tangent is rounded to bfloat16.
    np.testing.assert_allclose(out, tangent, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("policy", ["c=bf16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose"])
def test_a_preferred_element_type_accumulates_and_the_policy_says_what_is_returned(name, policy):
    options = {"dtype_policy": policy, "preferred_element_type": jnp.float32}
    run, params, x = function_of(f"nnx {name}", **options)
    returned = jnp.float32 if policy == "mixed_bfloat16" else jnp.bfloat16
    assert jax.eval_shape(run, params, x).dtype == returned
    assert dots(run, params, x) == [("bfloat16", "bfloat16", "float32")]
    gradient = jax.grad(lambda x: run(params, x).sum().astype(jnp.float32))
    assert jax.eval_shape(gradient, x).dtype == jnp.float32


@EACH_DENSE
def test_a_dot_general_of_the_users_own_is_obeyed_and_its_result_widened(name):
    calls = []

    def dot_general(*args, **kwargs):
        calls.append(kwargs.get("preferred_element_type"))
        return jax.lax.dot_general(*args, **kwargs)

    run, params, x = function_of(name, dot_general=dot_general, dtype_policy="mixed_bfloat16")
    calls.clear()
    assert jax.eval_shape(run, params, x).dtype == jnp.float32
    assert calls == [None]


@EACH_DENSE
def test_a_layer_that_returns_compute_dtype_is_flaxs_own_matmul(name):
    for options in ({"dtype_policy": "c=bf16"}, {"dtype": jnp.bfloat16}):
        run, params, x = function_of(name, **options)
        assert dots(run, params, x) == [("bfloat16",) * 3]


def test_an_embedding_as_a_boundary_looks_up_unrounded():
    tokens = np.array([2, 0])
    layer = nnx.Embed(3, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(tokens), layer.embedding[...][tokens])
    inner = nnx.Embed(3, 4, dtype_policy="c=bf16", rngs=nnx.Rngs(0))
    assert inner(tokens).dtype == inner.attend(jnp.ones((2, 4))).dtype == jnp.bfloat16
    theirs = linen.Embed(3, 4, dtype_policy="mixed_bfloat16")
    found, variables = theirs.init_with_output(jax.random.key(0), tokens)
    np.testing.assert_array_equal(found, variables["params"]["embedding"][tokens])
