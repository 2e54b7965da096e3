"""Both wings' WeightNorm and SpectralNorm: norms in float32, parameters kept as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import use_policy

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (3, 5))
both_wings = pytest.mark.parametrize("wing", [linen, nnx], ids=["linen", "nnx"])
both_wrappers = pytest.mark.parametrize("wrapper", ["WeightNorm", "SpectralNorm"])


def wrapped(layers: Any, wrapper: str, **given: Any) -> Any:
    """Returns a matmul whose kernel is normalised."""
    if layers in (linen, flax_linen):
        return getattr(layers, wrapper)(layers.Dense(6, **given), **given)
    rngs = flax_nnx.Rngs(0)
    return getattr(layers, wrapper)(layers.Linear(5, 6, rngs=rngs, **given), rngs=rngs, **given)


def call_of(model: Any, wrapper: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the variables, and a call: variables and inputs to outputs and variables after it."""
    options: dict[str, Any] = {"update_stats": True} if wrapper == "SpectralNorm" else {}
    if isinstance(model, flax_linen.Module):
        mutable = ["params", "batch_stats"]
        variables = model.init(KEY, X, **options)
        return variables, lambda v, x: model.apply(v, x, mutable=mutable, **options)
    graph, state = flax_nnx.split(model)

    def call(state: Any, x: jax.Array) -> tuple[Any, Any]:
        copy = flax_nnx.merge(graph, state, copy=True)
        return copy(x), flax_nnx.state(copy)

    return state, call


def built(layers: Any, wrapper: str, **given: Any) -> tuple[Any, Callable[..., Any]]:
    return call_of(wrapped(layers, wrapper, **given), wrapper)


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


@both_wings
@both_wrappers
@pytest.mark.parametrize(
    ("policy", "tolerance"), [(None, 0), ("mixed_bfloat16", 2**-5), ("mixed_float16", 2**-8)]
)
def test_float32_is_upstreams_bit_for_bit_and_half_is_close(wing, wrapper, policy, tolerance):
    variables, apply = built(flax_linen if wing is linen else flax_nnx, wrapper)
    expected, after = apply(variables, X)
    again, _ = apply(after, X)
    with use_policy(policy):
        variables, apply = built(wing, wrapper)
        y, after = apply(variables, X)
        y_again, _ = apply(after, X)
    for a, b in ((y, expected), (y_again, again)):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("policy", ["bfloat16", "p=bf16,c=f32"])
@both_wings
@both_wrappers
def test_gradients_of_normalised_half_weights_are_finite_and_half(wing, wrapper, policy):
    with use_policy(policy):
        variables, apply = built(wing, wrapper)
        square = lambda v: jnp.sum(apply(v, X)[0].astype(jnp.float32) ** 2)  # noqa: E731
        gradient = jax.grad(square, allow_int=True)(variables)
    assert [a.dtype for a in jax.tree.leaves(gradient)] == [
        a.dtype for a in jax.tree.leaves(variables)
    ]
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradient))


@both_wings
def test_a_dtype_of_the_layers_own_leaves_stored_weights_in_float32(wing):
    variables, apply = built(wing, "WeightNorm", dtype=jnp.bfloat16)
    y, after = apply(variables, X)
    assert y.dtype == jnp.bfloat16
    assert dtypes((variables, after)) == {"float32"}


def test_the_norm_of_a_large_kernel_does_not_overflow_in_float16():
    model = linen.WeightNorm(linen.Dense(2), dtype_policy="float16")
    with use_policy("float16"):
        variables = model.init(KEY, jnp.ones((1, 64)))
        kernel = jnp.full((64, 2), 300, jnp.float16)  # its squares are beyond float16
        params = jax.tree.map(lambda leaf: kernel if leaf.ndim == 2 else leaf, variables["params"])
        y: Any = model.apply({"params": params}, jnp.ones((1, 64)))
    np.testing.assert_allclose(y, 8.0, rtol=2e-3)


def test_weights_that_are_not_matched_pass_through():
    layer = linen.WeightNorm(linen.Dense(2), variable_filter={"nothing"}, use_scale=False)
    with use_policy("p=bf16,c=bf16"):
        variables: Any = layer.init(KEY, X)
        assert dtypes(variables) == {"bfloat16"}
        params = variables["params"]["layer_instance"]
        alone = linen.Dense(2).apply({"params": params}, X)
        np.testing.assert_array_equal(layer.apply(variables, X), alone)


@both_wings
@both_wrappers
def test_a_policy_applied_to_flaxs_own_model_reaches_the_wrappers(wing, wrapper):
    theirs = wrapped(flax_linen if wing is linen else flax_nnx, wrapper)
    ported = wing.apply_policy(theirs, "mixed_bfloat16")
    assert isinstance(ported, type(theirs))
    variables, apply = call_of(ported, wrapper)
    y, after = apply(variables, X)
    assert y.dtype == jnp.float32
    assert dtypes((variables, after)) == {"float32"}


@both_wrappers
def test_the_layer_inside_gets_unrounded_weights_and_half_ones_stay_stored(wrapper):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    with use_policy("p=f16,c=f32,o=f32"):
        layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        kernel = layer.kernel[...]
        steps = {"n_steps": 50} if wrapper == "SpectralNorm" else {}
        model = getattr(nnx, wrapper)(layer, rngs=nnx.Rngs(1), **steps)
    y = model(x)
    wide = np.asarray(kernel, np.float64)
    normalised = wide / np.linalg.norm(wide, axis=0 if wrapper == "WeightNorm" else None, ord=2)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ normalised, rtol=1e-5, atol=1e-5)
    stored = layer.kernel[...]
    assert stored.dtype == jnp.float16
    np.testing.assert_allclose(stored, normalised, rtol=2**-10)


def test_linens_layer_inside_is_handed_unrounded_weights_under_a_policy():
    seen = []

    class Probe(linen.Module):
        keep_params = ("kernel",)

        @flax_linen.compact
        def __call__(self, x):
            seen.append(self.param("kernel", linen.initializers.normal(), (5, 2)).dtype)
            return x

    model = linen.WeightNorm(Probe())
    variables = model.init(KEY, X)
    with use_policy("mixed_bfloat16"):
        seen.clear()
        model.apply(variables, X)
    assert seen == [jnp.dtype(jnp.float32)]


def test_weights_are_put_back_as_they_are_stored_when_the_layer_inside_fails():
    class Failing(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            raise RuntimeError("no")

    with use_policy("p=f16,c=f32,o=f32"):
        layer = Failing(8, 4, rngs=nnx.Rngs(0))
        model = nnx.WeightNorm(layer, rngs=nnx.Rngs(1))
    with pytest.raises(RuntimeError, match="no"):
        model(jnp.ones((2, 8)))
    assert layer.kernel[...].dtype == jnp.float16
