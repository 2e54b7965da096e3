"""InstanceNorm, WeightNorm and SpectralNorm: statistics and norms in float32, parameters kept as
they are stored.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import Policy, get_policy, use_policy
from policy.testing import assert_close_in_ulps

X = jax.random.normal(jax.random.key(1), (3, 5))
WRAPPERS = ("WeightNorm", "SpectralNorm")


def build(layers, wrapper, **kwargs):
    rngs = flax_nnx.Rngs(0)
    return getattr(layers, wrapper)(layers.Linear(5, 6, rngs=rngs, **kwargs), rngs=rngs, **kwargs)


def state(model):
    return flax_nnx.to_pure_dict(flax_nnx.state(model))


def dtypes(model):
    return {
        jax.tree_util.keystr(p): leaf.dtype.name
        for p, leaf in jax.tree_util.tree_leaves_with_path(state(model))
    }


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_float32_without_a_policy_is_upstreams_bit_for_bit(wrapper):
    ours, upstream = build(nnx, wrapper), build(flax_nnx, wrapper)
    equal(state(ours), state(upstream))
    for _ in range(2):
        equal(ours(X), upstream(X))
        equal(state(ours), state(upstream))


def test_upstreams_weight_norm_overwrites_live_weights_with_half():
    upstream = build(flax_nnx, "WeightNorm", dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        upstream(X)
    if upstream.layer_instance.kernel[...].dtype != jnp.bfloat16:
        pytest.skip("this Flax keeps what is stored")
    ours = build(nnx, "WeightNorm", dtype=jnp.bfloat16)
    assert ours(X).dtype == jnp.bfloat16
    assert set(dtypes(ours).values()) == {"float32"}


@pytest.mark.parametrize(
    "policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32", "p=bf16,c=f32")
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parameters_and_gradients_keep_param_dtype(wrapper, policy):
    policy = get_policy(policy)
    with use_policy(policy):
        model = build(nnx, wrapper)
    before = dtypes(model)
    assert {d for name, d in before.items() if "batch_stats" not in name} == {
        policy.param_dtype.name
    }
    assert {d for name, d in before.items() if "batch_stats" in name} <= {"float32"}
    y = model(X)
    assert y.dtype == policy.output_dtype and dtypes(model) == before

    @flax_nnx.jit
    def gradients(model):
        return flax_nnx.grad(lambda model: jnp.sum(model(X).astype(jnp.float32) ** 2))(model)

    leaves = jax.tree.leaves(flax_nnx.to_pure_dict(gradients(model)))
    assert {leaf.dtype for leaf in leaves} == {policy.param_dtype}
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)
    assert dtypes(model) == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_half_is_close_to_float32(wrapper):
    expected = build(nnx, wrapper)(X)
    for policy, tolerance in (("mixed_bfloat16", 2**-7), ("mixed_float16", 2**-10)):
        with use_policy(policy):
            model = build(nnx, wrapper)
        np.testing.assert_allclose(model(X), expected, atol=4 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_policy_applied_to_flaxs_own_model_reaches_the_wrappers(wrapper):
    model = build(flax_nnx, wrapper, param_dtype=jnp.float32)
    model = nnx.apply_policy(model, "mixed_bfloat16")
    assert isinstance(model, getattr(flax_nnx, wrapper))
    assert model(X).dtype == jnp.float32
    assert set(dtypes(model).values()) == {"float32"}


def test_statistics_of_a_model_built_in_half_are_widened_when_it_is_ported():
    model = flax_nnx.SpectralNorm(
        flax_nnx.Linear(5, 6, rngs=flax_nnx.Rngs(0)),
        param_dtype=jnp.bfloat16,
        rngs=flax_nnx.Rngs(0),
    )
    model = nnx.apply_policy(model, "mixed_bfloat16")
    model(X)
    assert set(dtypes(model).values()) == {"float32"}


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_instance_norm_keeps_an_offset_input_accurate(dtype):
    x = (1000 + jax.random.normal(jax.random.key(0), (2, 8, 8, 3))).astype(jnp.float32)
    true = np.asarray(x, np.float64)
    true = (true - true.mean((1, 2), keepdims=True)) / np.sqrt(
        true.var((1, 2), keepdims=True) + 1e-6
    )
    layer = nnx.InstanceNorm(3, rngs=flax_nnx.Rngs(0), dtype_policy=Policy("f32", dtype, dtype))
    y = layer(x)
    assert y.dtype == dtype and set(dtypes(layer).values()) == {"float32"}
    assert_close_in_ulps(y, true, 1, floor=2.0**-6)
    ours, upstream = (wing.InstanceNorm(3, rngs=flax_nnx.Rngs(0)) for wing in (nnx, flax_nnx))
    equal(ours(x), upstream(x))


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"])
def test_the_layer_inside_gets_unrounded_weights_and_half_ones_stay_stored(name):
    """As in linen: what is computed from half weights in float32 is rounded for storage only."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    with use_policy("p=f16,c=f32,o=f32"):
        layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        kernel = layer.kernel[...]
        model = getattr(nnx, name)(
            layer, rngs=nnx.Rngs(1), **({"n_steps": 50} if name == "SpectralNorm" else {})
        )
    y = model(x)
    wide = np.asarray(kernel, np.float64)
    normalised = wide / np.linalg.norm(wide, axis=0 if name == "WeightNorm" else None, ord=2)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ normalised, rtol=1e-5, atol=1e-5)
    stored = layer.kernel[...]
    assert stored.dtype == jnp.float16
    np.testing.assert_allclose(stored, normalised, rtol=2**-10)


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
