"""InstanceNorm, WeightNorm and SpectralNorm: statistics and norms in float32, parameters kept as
they are stored.
"""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from policy import Policy, get_policy, use_policy
from policy.testing import assert_close_in_ulps

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, 5))
WRAPPERS: Any = (("WeightNorm", {}), ("SpectralNorm", {"update_stats": True}))


class Model(nn.Module):
    """Two matmuls, the second one's kernel normalised."""

    layers: Any
    wrapper: str
    dtype: Any = None

    @nn.compact
    def __call__(self, x, **kwargs):
        given = {} if self.dtype is None else {"dtype": self.dtype}
        x = self.layers.Dense(4, **given)(x)
        return getattr(self.layers, self.wrapper)(self.layers.Dense(6, **given), **given)(
            x, **kwargs
        )


def dtypes(tree):
    return {
        jax.tree_util.keystr(path): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(("wrapper", "kwargs"), WRAPPERS)
def test_float32_without_a_policy_is_upstreams_bit_for_bit(wrapper, kwargs):
    ours, upstream = Model(nn, wrapper), Model(flax_nn, wrapper)
    variables = ours.init(KEY, X, **kwargs)
    equal(variables, upstream.init(KEY, X, **kwargs))
    for mutable in (["batch_stats"], ["params", "batch_stats"]):
        equal(
            ours.apply(variables, X, mutable=mutable, **kwargs),
            upstream.apply(variables, X, mutable=mutable, **kwargs),
        )


@pytest.mark.parametrize(("wrapper", "kwargs"), WRAPPERS)
def test_upstreams_init_stores_the_kernel_in_half(wrapper, kwargs):
    with jax.numpy_dtype_promotion("standard"):
        variables: Any = Model(flax_nn, wrapper, jnp.bfloat16).init(KEY, X, **kwargs)
    if variables["params"]["Dense_1"]["kernel"].dtype != jnp.bfloat16:
        pytest.skip("this Flax stores what param_dtype says")
    ours = Model(nn, wrapper, jnp.bfloat16).init(KEY, X, **kwargs)
    assert set(dtypes(ours).values()) == {"float32"}


@pytest.mark.parametrize(
    "policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32", "p=bf16,c=f32")
)
@pytest.mark.parametrize(("wrapper", "kwargs"), WRAPPERS)
def test_parameters_and_gradients_keep_param_dtype(wrapper, kwargs, policy):
    model = Model(nn, wrapper)
    policy = get_policy(policy)
    with use_policy(policy):
        variables: Any = model.init(KEY, X, **kwargs)
        y, updates = model.apply(variables, X, mutable=["params", "batch_stats"], **kwargs)

        def loss(params):
            y, _ = model.apply(variables | {"params": params}, X, mutable=["batch_stats"], **kwargs)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        gradient = jax.jit(jax.grad(loss))(variables["params"])
    assert y.dtype == policy.output_dtype
    assert set(dtypes(variables["params"]).values()) == {policy.param_dtype.name}
    assert set(dtypes(variables.get("batch_stats", {})).values()) <= {"float32"}
    assert dtypes(updates["params"]) == dtypes(variables["params"]) == dtypes(gradient)
    assert all(
        np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(gradient)
    )


@pytest.mark.parametrize(("wrapper", "kwargs"), WRAPPERS)
def test_half_is_close_to_float32(wrapper, kwargs):
    model = Model(nn, wrapper)
    variables = model.init(KEY, X, **kwargs)
    expected, _ = model.apply(variables, X, mutable=["batch_stats"], **kwargs)
    for policy, tolerance in (("mixed_bfloat16", 2**-7), ("mixed_float16", 2**-10)):
        with use_policy(policy):
            y, _ = model.apply(variables, X, mutable=["batch_stats"], **kwargs)
        np.testing.assert_allclose(y, expected, atol=4 * tolerance, rtol=4 * tolerance)


def test_the_norm_of_a_large_kernel_does_not_overflow_in_float16():
    model = nn.WeightNorm(nn.Dense(2), dtype_policy="float16")
    with use_policy("float16"):
        variables = model.init(KEY, jnp.ones((1, 64)))
        kernel = jnp.full((64, 2), 300, jnp.float16)  # its squares are beyond float16
        params = jax.tree.map(lambda leaf: kernel if leaf.ndim == 2 else leaf, variables["params"])
        y: Any = model.apply({"params": params}, jnp.ones((1, 64)))
    np.testing.assert_allclose(y, 8.0, rtol=2e-3)


def test_weights_that_are_not_matched_pass_through():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(2), variable_filter={"nothing"}, use_scale=False)(x)

    with use_policy("p=bf16,c=bf16"):
        variables = Both().init(KEY, X)
        assert set(dtypes(variables).values()) == {"bfloat16"}
        alone = nn.Dense(2).apply({"params": variables["params"]["Dense_0"]}, X)
        np.testing.assert_array_equal(Both().apply(variables, X), alone)


def test_the_layer_inside_is_handed_unrounded_weights_under_a_policy():
    seen = []

    class Probe(nn.Module):
        keep_params = ("kernel",)

        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (5, 2))
            seen.append(kernel.dtype)
            return x

    model = nn.WeightNorm(Probe())
    variables = model.init(KEY, X)
    with use_policy("mixed_bfloat16"):
        seen.clear()
        model.apply(variables, X)
    assert seen == [jnp.dtype(jnp.float32)]


def test_a_policy_applied_to_flaxs_own_model_reaches_the_wrappers():
    class Theirs(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x):
            return flax_nn.WeightNorm(flax_nn.Dense(6))(x)

    variables = Theirs().init(KEY, X)
    ported = nn.apply_policy(Theirs(), "mixed_bfloat16")
    equal(ported.init(KEY, X), variables)
    y: Any = ported.apply(variables, X)
    assert y.dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda v: ported.apply(v, X))(variables))
    assert "bf16[3,6] = dot_general" in text or "f32[3,6] = dot_general" in text
    assert "bf16[5,6] = convert_element_type" in text


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_instance_norm_keeps_an_offset_input_accurate(dtype):
    x = (1000 + jax.random.normal(KEY, (2, 8, 8, 3))).astype(jnp.float32)
    true = np.asarray(x, np.float64)
    true = (true - true.mean((1, 2), keepdims=True)) / np.sqrt(
        true.var((1, 2), keepdims=True) + 1e-6
    )
    layer = nn.InstanceNorm(dtype_policy=Policy("f32", dtype, dtype))
    y, variables = layer.init_with_output(KEY, x)
    assert y.dtype == dtype and set(dtypes(variables).values()) == {"float32"}
    assert_close_in_ulps(y, true, 1, floor=2.0**-6)
    equal(
        nn.InstanceNorm().init_with_output(KEY, x), flax_nn.InstanceNorm().init_with_output(KEY, x)
    )


def test_instance_norm_gradients_are_summed_in_float32():
    x = jax.random.normal(KEY, (4, 32, 32, 2))
    layer = nn.InstanceNorm()
    with use_policy("mixed_bfloat16"):
        variables = layer.init(KEY, x)

        def loss(params, x):
            y: Any = layer.apply({"params": params}, x.astype(jnp.bfloat16))
            return jnp.sum(y.astype(jnp.float32))

        gradient = jax.grad(loss)(variables["params"], x)
        text = str(jax.make_jaxpr(jax.grad(loss))(variables["params"], x))
    np.testing.assert_array_equal(gradient["bias"], 4 * 32 * 32)
    assert gradient["scale"].dtype == jnp.float32
    assert not [
        line for line in text.splitlines() if "reduce_sum" in line and ":bf16" in line.split("=")[0]
    ]
