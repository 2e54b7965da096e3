"""`accumulate_gradients`: the mean over microbatches, in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec

from policy import (
    DynamicLossScale,
    accumulate_gradients,
    apply_gradients,
    mixed_precision,
    split_batch,
    value_and_grad,
)
from policy.core.arrays import OVERWRITE_WITH_GRADIENT
from policy.grads import ScaledGradients
from policy.inspect.hlo.dump import without_cache
from tests.benchmarks.accelerators import target

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(24, 4)), jnp.float32)


def loss_fn(params, x):
    return jnp.mean(jnp.square((x.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32)))


def params_in(dtype):
    return {"w": jnp.asarray(np.linspace(-1, 1, 8).reshape(4, 2), dtype)}


def given(params, g):
    """A loss whose gradient is its microbatch."""
    return jnp.sum(g.astype(jnp.float32)), {"w": g}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_mean_over_microbatches_is_the_whole_batchs(dtype, count):
    params = params_in(dtype)
    loss, grads = accumulate_gradients(value_and_grad(loss_fn), params, split_batch(X, count))
    whole_loss, whole = value_and_grad(loss_fn)(params, X)
    assert grads["w"].dtype == loss.dtype == jnp.float32
    tolerance = 1e-6 if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(loss, whole_loss, rtol=tolerance)
    np.testing.assert_allclose(grads["w"], whole["w"], rtol=tolerance, atol=tolerance)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    values = jnp.full((1024, 1), float(jnp.finfo(dtype).eps) / 2, dtype).at[0].set(1)
    naive = jax.lax.scan(lambda total, g: (total + g, None), jnp.zeros(1, dtype), values)[0]
    assert naive == 1  # what a sum in half loses
    _, grads = accumulate_gradients(given, {"w": jnp.ones(1)}, values)
    assert grads["w"].dtype == jnp.float32
    mean = np.asarray(values, np.float64).mean(0)
    np.testing.assert_array_equal(grads["w"], mean.astype(np.float32))


def test_scaled_gradients_keep_their_scale_and_are_rounded_once():
    values = jnp.asarray([[1.0], [1 + 2**-7], [1 + 2**-6], [1 + 2**-7]], jnp.bfloat16)
    fn = lambda params, g: (jnp.sum(g.astype(jnp.float32)), ScaledGradients({"w": g}, 24.0))  # noqa: E731
    _, grads = jax.jit(lambda: accumulate_gradients(fn, {"w": jnp.ones(1)}, values))()
    assert isinstance(grads, ScaledGradients)
    assert grads.scale == 24
    assert grads.tree["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads.tree["w"].astype(jnp.float32), 1 + 2**-7)


def test_gradients_of_different_scales_are_rejected_or_skip_the_step():
    fn = lambda params, scale: (scale, ScaledGradients({"w": params["w"]}, scale))  # noqa: E731
    params, scales = {"w": jnp.ones(2)}, jnp.asarray([8.0, 4.0])
    with pytest.raises(ValueError, match=r"gradients should share one scale, but got \[8\. 4\.\]"):
        accumulate_gradients(fn, params, scales)
    tx = mixed_precision(optax.sgd(0.1), "float32")

    @jax.jit
    def step():
        gradients = accumulate_gradients(fn, params, scales)[1]
        return apply_gradients(tx, params, tx.init(params), gradients)

    new, _, finite = step()
    assert not finite
    np.testing.assert_array_equal(new["w"], 1)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("kind", ["float32", "compute"])
def test_a_fault_in_any_microbatch_skips_the_step(kind):
    params = params_in(jnp.float32)
    tx = mixed_precision(optax.adam(0.1), "mixed_bfloat16", loss_scale=DynamicLossScale(8.0))
    state = tx.init(params)

    @jax.jit
    def step(batches):
        policy = "mixed_bfloat16" if kind == "compute" else None
        fn = value_and_grad(loss_fn, policy=policy, loss_scale=state.loss_scale, grads=kind)
        return apply_gradients(tx, params, state, accumulate_gradients(fn, params, batches)[1])

    batches = split_batch(X, 3)
    assert step(batches)[2]
    for position in range(3):
        for value in (np.nan, np.inf):
            new, after, finite = step(batches.at[position, 2, 1].set(value))
            assert not finite
            assert after.loss_scale.loss_scale == 4
            np.testing.assert_array_equal(new["w"], params["w"])


@pytest.mark.slow
def test_weights_make_it_the_mean_over_tokens():
    mask = jnp.asarray(RNG.integers(0, 2, size=24), jnp.float32).at[0].set(1)

    def masked(params, batch):
        x, mask = batch
        return jnp.sum(jnp.square(x @ params["w"]).mean(-1) * mask) / jnp.sum(mask)

    params, batches = params_in(jnp.float32), split_batch((X, mask), 4)
    loss, grads = accumulate_gradients(
        value_and_grad(masked), params, batches, weights=batches[1].sum(-1)
    )
    whole_loss, whole = value_and_grad(masked)(params, (X, mask))
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], whole["w"], rtol=1e-5, atol=1e-7)


def test_a_microbatch_of_weight_zero_is_left_out_whatever_it_holds():
    values = jnp.asarray([[1.0], [np.nan], [4.0]])
    loss, grads = accumulate_gradients(given, {"w": jnp.ones(1)}, values, weights=[1, 0, 2])
    np.testing.assert_array_equal(grads["w"], 3)
    assert loss == 3
    _, grads = accumulate_gradients(given, {"w": jnp.ones(1)}, values, weights=[0, 0, 0])
    assert np.isnan(grads["w"]).all()


@pytest.mark.slow
def test_aux_is_stacked_and_keys_are_a_part_of_the_microbatches():
    def noisy(params, batch):
        x, key = batch
        return loss_fn(params, x), {"noise": jax.random.normal(key), "x": x}

    keys = jax.random.split(jax.random.key(0), 3)
    (loss, aux), grads = accumulate_gradients(
        value_and_grad(noisy, has_aux=True, grads="compute"),
        params_in(jnp.float32),
        (split_batch(X, 3), keys),
    )
    assert loss.shape == ()
    assert aux["x"].shape == (3, 8, 4)
    np.testing.assert_array_equal(aux["noise"], jax.vmap(jax.random.normal)(keys))
    assert isinstance(grads, ScaledGradients)


def test_overwritten_values_become_the_largest_and_are_neither_averaged_nor_cast():
    tree = lambda x: {OVERWRITE_WITH_GRADIENT: {"amax": x}, "w": x.astype(jnp.bfloat16)}  # noqa: E731
    values = jnp.asarray([[3.0], [-1.0], [5.0 + 2**-20]])
    for wrap in (lambda t: t, lambda t: ScaledGradients(t, 2.0)):
        fn = lambda params, x, wrap=wrap: (jnp.float32(0), wrap(tree(x)))  # noqa: E731
        _, grads = accumulate_gradients(fn, None, values, weights=[1, 1, 2])
        grads = grads.tree if isinstance(grads, ScaledGradients) else grads
        np.testing.assert_array_equal(grads[OVERWRITE_WITH_GRADIENT]["amax"], values[2])
        np.testing.assert_allclose(grads["w"].astype(jnp.float32), 3, rtol=2**-8)


@pytest.mark.slow
def test_wide_and_complex_gradients_keep_their_dtype():
    fn = lambda params, x: (jnp.float32(0), {"c": x * np.complex64(1 + 1j)})  # noqa: E731
    _, grads = accumulate_gradients(fn, None, jnp.ones((2, 3), jnp.complex64))
    assert grads["c"].dtype == jnp.complex64
    np.testing.assert_array_equal(grads["c"], np.full(3, 1 + 1j, np.complex64))
    with jax.enable_x64(True):
        fn = lambda params, x: (jnp.sum(x), {"w": x})  # noqa: E731
        loss, grads = accumulate_gradients(fn, None, jnp.ones((2, 3), jnp.float64))
        assert grads["w"].dtype == loss.dtype == jnp.float64


def test_it_holds_one_microbatch_at_a_time():
    jaxpr = jax.make_jaxpr(lambda p, x: accumulate_gradients(value_and_grad(loss_fn), p, x))(
        params_in(jnp.float32), split_batch(X, 8)
    )
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("scan") == 1
    assert "dot_general" not in names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "h100:4"])
@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("model")])
def test_a_sum_of_scatters_is_exchanged_before_it_is_added(name, spec):
    """Compilers of jax 0.10 and 0.11 add first, and lose what devices but the first have added."""
    mesh = jax.sharding.Mesh(np.reshape(target(name).devices, (2, 2)), ("data", "model"))
    table = ShapeDtypeStruct((96, 256), jnp.float32, sharding=NamedSharding(mesh, spec))
    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = ShapeDtypeStruct((16, 8), jnp.int32, sharding=split)
    fn = value_and_grad(lambda table, tokens: jnp.sum(jnp.square(table[tokens])))

    def by_hand(table, batch):
        add = lambda total, tokens: (total + fn(table, tokens)[1], None)  # noqa: E731
        return jax.lax.scan(add, jnp.zeros_like(table), split_batch(batch, 2))[0]

    def ours(table, batch):
        return accumulate_gradients(fn, table, split_batch(batch, 2))[1]

    def is_last(step):
        """Returns whether an exchange of the table's gradient stands behind the loop."""
        lowered = (
            jax.jit(step, out_shardings=table.sharding)
            .trace(table, batch)
            .lower(lowering_platforms=(target(name).platform,))
        )
        with without_cache():
            entry = (lowered.compile().as_text() or "").split("ENTRY")[1]
        return bool(re.search(r"f32\[(96|48),256\]\S* all-reduce", entry))

    assert not is_last(ours)
    assert is_last(by_hand) == (jax.__version_info__ < (0, 12))


def test_split_batch_keeps_every_example_and_strides():
    batch = {"x": jnp.arange(12).reshape(6, 2), "y": np.arange(6)}
    split = split_batch(batch, 3)
    assert split["x"].shape == (3, 2, 2)
    np.testing.assert_array_equal(split["y"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(split["x"][1], batch["x"][1::3])
