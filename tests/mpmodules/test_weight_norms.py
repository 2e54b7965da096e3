"""Both apis' WeightNorm and SpectralNorm: norms in float32, parameters kept as they are stored."""

from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import use_policy
from tests.mpmodules.table.cases import CASES
from tests.mpmodules.table.running import built, dtypes_of, program

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (3, 4))
NAMES = ("WeightNorm", "SpectralNorm in training")
WRAPPERS = [(api, case) for api, case in CASES if str(case) in NAMES]
EACH = pytest.mark.parametrize(
    ("api", "case"), WRAPPERS, ids=[f"{api}-{case}" for api, case in WRAPPERS]
)


@pytest.mark.cases(slow=2)
@EACH
@pytest.mark.parametrize("policy", ["bfloat16", "p=bf16,c=f32"])
def test_gradients_of_normalized_half_weights_are_finite_and_half(api, case, policy):
    call, params, inputs = built(api, case, policy)
    gradient = jax.grad(lambda p: jnp.sum(call(p, *inputs).astype(jnp.float32) ** 2))(params)
    assert dtypes_of(gradient) == dtypes_of(params) == {"bfloat16"}
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradient))


@pytest.mark.cases(fast=1)
@EACH
def test_a_dtype_of_the_layers_own_leaves_stored_weights_in_float32(api, case):
    run = program(api, case, dtype=jnp.bfloat16)
    params, rest = run.init(KEY)
    y, after = run.apply(params, rest, run.inputs)
    assert y.dtype == jnp.bfloat16
    assert dtypes_of((params, rest, after)) == {"float32"}


@pytest.mark.cases(fast=1)
@EACH
def test_a_policy_applied_to_flaxs_own_model_reaches_the_wrappers(api, case):
    if api == "linen":
        ported: Any = linen.apply_policy(case.make(flax_linen), "mixed_bfloat16")
        variables = ported.init(KEY, X, **case.call)
        y, after = ported.apply(variables, X, mutable=["params", "batch_stats"], **case.call)
    else:
        theirs = case.make(flax_nnx, flax_nnx.Rngs(0))
        ported = nnx.apply_policy(theirs, "mixed_bfloat16")
        assert isinstance(ported, type(theirs))
        variables, y, after = flax_nnx.state(ported), ported(X), flax_nnx.state(ported)
    assert y.dtype == jnp.float32
    assert dtypes_of((variables, after)) == {"float32"}


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
        assert dtypes_of(variables) == {"bfloat16"}
        params = variables["params"]["layer_instance"]
        alone = linen.Dense(2).apply({"params": params}, X)
        np.testing.assert_array_equal(layer.apply(variables, X), alone)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("wrapper", ["WeightNorm", "SpectralNorm"])
def test_the_layer_inside_gets_unrounded_weights_and_half_ones_stay_stored(wrapper):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    with use_policy("p=f16,c=f32,o=f32"):
        layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        kernel = layer.kernel[...]
        steps = {"n_steps": 50} if wrapper == "SpectralNorm" else {}
        model = getattr(nnx, wrapper)(layer, rngs=nnx.Rngs(1), **steps)
    y = model(x)
    wide = np.asarray(kernel, np.float64)
    normalized = wide / np.linalg.norm(wide, axis=0 if wrapper == "WeightNorm" else None, ord=2)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ normalized, rtol=1e-5, atol=1e-5)
    stored = layer.kernel[...]
    assert stored.dtype == jnp.float16
    np.testing.assert_allclose(stored, normalized, rtol=2**-10)


def test_linens_layer_inside_is_handed_unrounded_weights_under_a_policy():
    seen = []

    class Probe(linen.Module):
        keep_params = ("kernel",)

        @flax_linen.compact
        def __call__(self, x):
            seen.append(self.param("kernel", linen.initializers.normal(), (4, 2)).dtype)
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
