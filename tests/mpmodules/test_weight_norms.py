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
from policy import get_policy, use_policy

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (3, 5))
WRAPPERS = ("WeightNorm", "SpectralNorm")
POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32", "p=bf16,c=f32")
UPSTREAM: dict[Any, Any] = {linen: flax_linen, nnx: flax_nnx}
both_wings = pytest.mark.parametrize("wing", [linen, nnx], ids=["linen", "nnx"])
both_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


class LinenModel(linen.Module):
    """A matmul whose kernel is normalised, after one whose kernel is not."""

    layers: Any
    wrapper: str
    dtype: Any = None

    @flax_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        given = {} if self.dtype is None else {"dtype": self.dtype}
        inside = self.layers.Dense(6, **given)
        call = {"update_stats": True} if self.wrapper == "SpectralNorm" else {}
        x = self.layers.Dense(4, **given)(x)
        return getattr(self.layers, self.wrapper)(inside, **given)(x, **call)


def built(layers: Any, wrapper: str, **given: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the variables, and a call: variables and inputs to outputs and variables after it."""
    if layers in (linen, flax_linen):
        model = LinenModel(layers, wrapper, **given)

        def apply(variables: Any, x: jax.Array) -> tuple[Any, Any]:
            return model.apply(variables, x, mutable=["params", "batch_stats"])

        return model.init(KEY, X), apply
    rngs = flax_nnx.Rngs(0)
    model = getattr(layers, wrapper)(layers.Linear(5, 6, rngs=rngs, **given), rngs=rngs, **given)
    graph, state = flax_nnx.split(model)

    def call(state: Any, x: jax.Array) -> tuple[Any, Any]:
        copy = flax_nnx.merge(graph, state, copy=True)
        y = copy(x)
        return y, flax_nnx.state(copy)

    return state, call


def dtypes(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in leaves}


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@both_wings
@both_wrappers
def test_float32_without_a_policy_is_upstreams_bit_for_bit(wing, wrapper):
    (ours, apply), (theirs, their_apply) = (built(w, wrapper) for w in (wing, UPSTREAM[wing]))
    equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    for _ in range(2):
        (y, ours), (expected, theirs) = apply(ours, X), their_apply(theirs, X)
        equal(y, expected)
        equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))


@both_wings
def test_a_dtype_of_the_layers_own_leaves_stored_weights_in_float32(wing):
    variables, apply = built(wing, "WeightNorm", dtype=jnp.bfloat16)
    y, after = apply(variables, X)
    assert y.dtype == jnp.bfloat16
    assert set(dtypes((variables, after)).values()) == {"float32"}


@pytest.mark.parametrize("policy", POLICIES)
@both_wings
@both_wrappers
def test_parameters_and_gradients_keep_param_dtype(wing, wrapper, policy):
    policy = get_policy(policy)
    with use_policy(policy):
        variables, apply = built(wing, wrapper)
        y, after = apply(variables, X)
        gradient = jax.grad(
            lambda v: jnp.sum(apply(v, X)[0].astype(jnp.float32) ** 2), allow_int=True
        )(variables)
    assert y.dtype == policy.output_dtype
    assert dtypes(variables) == dtypes(after) == dtypes(gradient)
    assert all(
        dtype == ("float32" if "batch_stats" in name else policy.param_dtype.name)
        for name, dtype in dtypes(variables).items()
    )
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradient))


@both_wings
@both_wrappers
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 2**-7), ("mixed_float16", 2**-10)]
)
def test_half_is_close_to_float32(wing, wrapper, policy, tolerance):
    variables, apply = built(wing, wrapper)
    expected, _ = apply(variables, X)
    with use_policy(policy):
        variables, apply = built(wing, wrapper)
        y, _ = apply(variables, X)
    np.testing.assert_allclose(y, expected, atol=4 * tolerance, rtol=4 * tolerance)


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
        assert set(dtypes(variables).values()) == {"bfloat16"}
        params = variables["params"]["layer_instance"]
        alone = linen.Dense(2).apply({"params": params}, X)
        np.testing.assert_array_equal(layer.apply(variables, X), alone)


@both_wings
@both_wrappers
def test_a_policy_applied_to_flaxs_own_model_reaches_the_wrappers(wing, wrapper):
    options: dict[str, Any] = {"update_stats": True} if wrapper == "SpectralNorm" else {}
    if wing is linen:
        theirs = getattr(flax_linen, wrapper)(flax_linen.Dense(6))
        variables = theirs.init(KEY, X, **options)
        ported = linen.apply_policy(theirs, "mixed_bfloat16")
        equal(ported.init(KEY, X, **options), variables)
        y: Any = ported.apply(variables, X, mutable=["batch_stats"], **options)[0]
    else:
        rngs = flax_nnx.Rngs(0)
        half = {"param_dtype": jnp.bfloat16} if wrapper == "SpectralNorm" else {}
        inside = flax_nnx.Linear(5, 6, rngs=rngs)
        theirs = getattr(flax_nnx, wrapper)(inside, rngs=rngs, **half)
        ported = nnx.apply_policy(theirs, "mixed_bfloat16")
        assert isinstance(ported, getattr(flax_nnx, wrapper))
        y, variables = ported(X), flax_nnx.state(ported)
    assert y.dtype == jnp.float32
    assert set(dtypes(variables).values()) == {"float32"}


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
            kernel = self.param("kernel", linen.initializers.normal(), (5, 2))
            seen.append(kernel.dtype)
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
