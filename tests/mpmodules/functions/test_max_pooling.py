"""The extremum of windows as GPUs get it: values and gradients, forward and backward."""

import contextlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen as nn
from mpmodules import nnx
from mpmodules.functions.max_pooling import extremum
from policy import use_policy
from policy.core.scope import traced_for
from policy.programs.reading.walk import walk
from policy.testing import assert_close_in_ulps

CASES = {
    "overlapping": ((2, 9, 8, 3), (3, 3), (2, 2), "SAME"),
    "no batch": ((9, 8, 3), (2, 2), (2, 2), "VALID"),
    "two batch axes": ((2, 3, 7, 6, 2), (3, 2), (1, 2), "SAME"),
    "explicit padding": ((2, 9, 8, 3), (3, 3), (3, 1), ((1, 0), (2, 1))),
    "one dim, no strides": ((2, 7, 3), (2,), None, "VALID"),
    "gaps": ((2, 9, 9, 1), (2, 2), (4, 4), "VALID"),
}


def drawn(shape, dtype=jnp.float32, seed=0):
    """Numbers with many ties."""
    return jax.random.normal(jax.random.key(seed), shape).round(0).astype(dtype)


def of_gpu():
    """A scope in which programs are traced for an H100, and run here all the same."""
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H100")
    return traced_for(device)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("largest", (True, False))
def test_values_and_gradients_are_upstreams(case, largest):
    shape, *arguments = CASES[case]
    upstream = flax_nnx.max_pool if largest else flax_nnx.min_pool
    x = drawn(shape)
    expected, backward = jax.vjp(lambda x: upstream(x, *arguments), x)
    found, ours = jax.vjp(lambda x: extremum(x, *arguments, largest=largest), x)
    np.testing.assert_array_equal(found, expected)
    cotangent = drawn(expected.shape, seed=1)  # integers, whose sums are exact in any order
    np.testing.assert_array_equal(ours(cotangent)[0], backward(cotangent)[0])


def test_forward_mode_is_the_transpose_of_backward_and_maps():
    x, tangent = drawn((3, 6, 6, 2)), jax.random.normal(jax.random.key(1), (3, 6, 6, 2))

    def pool(x):
        return extremum(x, (3, 3), (2, 2), "SAME", largest=True)

    out, forward = jax.jvp(pool, (x,), (tangent,))
    cotangent = jax.random.normal(jax.random.key(2), out.shape)
    (backward,) = jax.vjp(pool, x)[1](cotangent)
    np.testing.assert_allclose(jnp.vdot(forward, cotangent), jnp.vdot(tangent, backward), rtol=1e-5)
    each = jax.vmap(lambda x: jax.jacobian(pool)(x[None])[0, ..., 0, :, :, :])(x)
    assert each.shape == (*out.shape, *x.shape[1:])


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_gradients_of_half_precision_are_summed_in_float32_and_rounded_once(dtype):
    x = jnp.zeros((1, 5, 5, 1), dtype).at[0, 2, 2, 0].set(1)  # the largest of nine windows
    cotangent = 1 + jax.random.uniform(jax.random.key(0), (1, 3, 3, 1)).astype(dtype)
    with of_gpu():
        found = jax.vjp(lambda x: nn.max_pool(x, (3, 3)), x)[1](cotangent)[0]
    assert found.dtype == dtype
    exact = np.asarray(cotangent, np.float64).sum()
    assert_close_in_ulps(found[0, 2, 2, 0], exact, 0.5)
    assert jnp.count_nonzero(found) == 1


def test_the_sums_of_a_gradient_are_in_the_policys_reduction_dtype():
    x = jnp.ones((1, 5, 5, 1), jnp.bfloat16)

    def sums(policy):
        def pooled(x):
            with of_gpu(), use_policy(policy):
                return nn.max_pool(x, (3, 3))

        sites = walk(jax.make_jaxpr(lambda x: jax.vjp(pooled, x)[1](pooled(x)))(x))
        added = [site.equation for site in sites if site.name in ("add", "add_any")]
        return {one.outvars[0].aval.dtype.name for one in added if one.outvars[0].aval.ndim}

    assert sums("mixed_bfloat16") == {"float32"}
    assert sums("p=f32,c=bf16,o=f32,reduction=bf16") == {"bfloat16"}


def test_the_first_nan_of_a_window_gets_its_cotangent():
    x = jnp.array([[1.0, jnp.nan, jnp.nan]])[..., None]
    found = jax.grad(lambda x: extremum(x, (3,), None, ((1, 0),), largest=True).sum())(x)
    np.testing.assert_array_equal(found[0, :, 0], [0, 2, 0])  # of two windows


def primitives(function, *args):
    return {site.name for site in walk(jax.make_jaxpr(function)(*args))}


@pytest.mark.parametrize("pool", (nn.max_pool, nnx.min_pool))
def test_it_runs_under_a_policy_on_gpus_alone(pool):
    x = jnp.ones((1, 4, 4, 1))

    def used(scope, window=(2, 2)):
        with scope, use_policy("mixed_bfloat16"):
            gradient = jax.grad(lambda x: pool(x, window).astype(jnp.float32).sum())
            return "select_and_scatter_add" not in primitives(gradient, x)

    assert used(of_gpu()) and not used(contextlib.nullcontext())
    assert not used(of_gpu(), (4, 5))  # of as many terms as elements
    with of_gpu():  # float32 without a policy is Flax's
        assert "select_and_scatter_add" in primitives(jax.grad(lambda x: pool(x, (2, 2)).sum()), x)


def test_backward_keeps_its_input_and_its_output_alone():
    x = drawn((2, 8, 8, 3), jnp.bfloat16)
    with of_gpu():
        _, backward = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) > 1]
    assert sorted(leaf.shape for leaf in kept) == [(2, 4, 4, 3), (2, 8, 8, 3)]
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("bfloat16")}


def pooled(x, *arguments):
    with of_gpu(), use_policy("mixed_bfloat16"):
        return jax.vjp(lambda x: nn.max_pool(x, *arguments), x)


@pytest.mark.parametrize(
    "shape, arguments",
    [
        ((2, 2, 2, 3), ((4, 4), (2, 2))),  # no window fits
        ((2, 0, 6, 3), ((3, 3), (2, 2), "SAME")),
        ((2, 5, 5, 3), ((3, 3), (2, 2), ((-2, -2), (0, 0)))),
    ],
)
def test_windows_that_are_larger_than_the_input_are_upstreams(shape, arguments):
    out, backward = pooled(jnp.ones(shape), *arguments)
    assert out.size == 0
    if shape[1] < 5:  # upstream can't differentiate negative padding
        np.testing.assert_array_equal(backward(out)[0], jnp.zeros(shape))


def test_dtypes_without_infinities_are_upstreams():
    x = jnp.ones((1, 4, 4, 1), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(pooled(x, (2, 2))[0].astype(jnp.float32), jnp.ones((1, 3, 3, 1)))


def test_sizes_that_are_not_known_are_upstreams():
    (size,) = jax.export.symbolic_shape("h", constraints=["h>=4"])
    x = jax.ShapeDtypeStruct((1, size, size, 2), jnp.bfloat16)
    with of_gpu(), use_policy("mixed_bfloat16"):
        pool = jax.jit(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"))
        assert jax.export.export(pool)(x).out_avals[0].ndim == 4


def test_wrong_arguments_are_rejected_with_upstreams_words():
    wrong: Any = ((2, 2), (1,)), ((2, 2), None, (1, 1)), ((2, 2, 2, 2),)
    for arguments in wrong:
        with pytest.raises(Exception) as theirs:
            nn.max_pool(jnp.ones((1, 4, 4, 1)), *arguments)
        with pytest.raises(type(theirs.value)) as ours:
            pooled(jnp.ones((1, 4, 4, 1)), *arguments)
        assert str(ours.value) == str(theirs.value)
