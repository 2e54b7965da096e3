"""`vary` and `all_reduce`: where gradients are summed over devices, and in which dtype.

Devices are the elements of a `jax.vmap`, or an abstract mesh's, of which a program is traced and
nothing is run. `sharding/on_eight_devices.py` runs the same on eight.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from policy import apply_gradients, mixed_precision, value_and_grad
from policy.core.arrays import OVERWRITE_WITH_GRADIENT
from policy.grads import ScaledGradients
from policy.sharding import all_reduce, collectives_of, vary

DEVICES = 8
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("i")
PARAMS = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((DEVICES, 4), jnp.float32)


def on_devices(function):
    """`function` mapped over the first axis of its arguments, named "i"."""
    return jax.vmap(function, axis_name="i")


def traced(function, *args, in_specs=(EVERYWHERE, SPLIT), check_vma=True):
    """Returns the collectives of `function` under `jax.shard_map` over eight abstract devices."""
    mesh = AbstractMesh((DEVICES,), ("i",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": in_specs, "out_specs": EVERYWHERE}
    mapped = jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs)
    return collectives_of(mapped, *args, stage="traced")


def loss_fn(params, x):
    half = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    return jnp.sum(jnp.square(half.astype(jnp.float32)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_gradients_of_varying_params_cross_devices_once_in_the_dtype_that_is_asked(
    dtype, check_vma
):
    def step(params, x):
        run = value_and_grad(loss_fn, policy="mixed_bfloat16", grads="compute")
        _, grads = run(vary(params, "i"), x)
        assert grads.tree["w"].dtype == jnp.bfloat16
        return all_reduce(grads, "i", dtype).tree

    (only,) = traced(step, PARAMS, BATCH, check_vma=check_vma)
    assert (only.operation, only.dtype) == ("all-reduce", dtype)
    assert (only.shape, only.axes) == ((4, 2), ("i",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_params_that_vary_inside_the_loss_are_summed_in_that_dtype(dtype):
    def step(params, x):
        return jax.grad(lambda p: loss_fn(vary(p, "i", dtype), x))(params)

    (only,) = traced(step, PARAMS, BATCH)
    assert (only.dtype, only.shape) == (dtype, (4, 2))


@pytest.mark.slow
def test_the_uses_of_a_half_precision_param_add_up_in_float32_on_their_way_to_the_sum():
    def loss_of(params, x):
        params = vary(params, "i", "float32")
        return sum(jnp.sum((params["w"] * x[use]).astype(jnp.float32)) for use in range(64))

    params = {"w": jnp.ones((DEVICES, 1), jnp.bfloat16)}
    x = jnp.asarray(1 + np.arange(64 * DEVICES).reshape(DEVICES, 64, 1) % 128 / 128, jnp.bfloat16)
    grads = on_devices(lambda p, x: value_and_grad(loss_of)(p, x)[1])(params, x)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"][0], np.sum(np.asarray(x, np.float64), axis=(0, 1)))


@pytest.mark.slow
def test_vary_changes_no_number_and_no_leaf_that_has_no_gradient():
    key = jax.random.key(0)
    tree = {"w": jnp.arange(3.0), "n": jnp.arange(3), "key": key, "c": jnp.ones(3, jnp.complex64)}
    for dtype in (None, "bfloat16"):
        varied = on_devices(lambda i, dtype=dtype: (vary(tree, "i", dtype), i)[0])(jnp.arange(2))
        np.testing.assert_array_equal(varied["w"][1], tree["w"])
        np.testing.assert_array_equal(varied["n"][1], tree["n"])
        assert varied["c"].dtype == jnp.complex64
        assert varied["key"].dtype == key.dtype


def test_float16_gradients_are_divided_before_they_are_summed():
    grads = jnp.full((4, 2), 20000, jnp.float16)
    assert np.isinf(on_devices(lambda g: lax.psum(g, "i") / np.float16(4))(grads)).all()  # without
    mean = on_devices(lambda g: all_reduce(ScaledGradients({"w": g}, 8.0), "i", "float16"))(grads)
    np.testing.assert_array_equal(mean.tree["w"], np.full((4, 2), 20000, np.float16))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_mean_is_right_to_an_ulp_a_device_of_the_dtype_it_is_summed_in(dtype, count):
    values = np.random.default_rng(1).normal(size=(count, 64)).astype(np.float32)
    mean = on_devices(lambda g: all_reduce(g, "i", dtype))(jnp.asarray(values))
    assert mean.dtype == jnp.float32  # a plain tree is
    largest = np.abs(values).max() * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(mean[0], values.astype(np.float64).mean(0), rtol=0, atol=largest)


@pytest.mark.slow
def test_scaled_gradients_keep_their_scale_and_come_back_in_the_dtype_of_the_sum():
    grads = jnp.asarray([[1.0], [2.0]], jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        reduce = lambda g, dtype=dtype: all_reduce(ScaledGradients([g], 1024.0), "i", dtype)  # noqa: E731
        mean = on_devices(reduce)(grads)
        assert mean.tree[0].dtype == dtype
        np.testing.assert_array_equal(mean.tree[0].astype(jnp.float32), 1.5)
        np.testing.assert_array_equal(jax.vmap(lambda m: m.scale)(mean), 1024)


@pytest.mark.slow
def test_overwritten_values_become_the_largest_of_the_devices():
    values = jnp.asarray([[3.0], [7.0], [5.0]])
    tree = {OVERWRITE_WITH_GRADIENT: {"scale": values}, "w": values}
    mean = on_devices(lambda g: all_reduce(ScaledGradients(g, 2.0), "i", "bfloat16"))(tree)
    np.testing.assert_array_equal(mean.tree[OVERWRITE_WITH_GRADIENT]["scale"], 7.0)
    assert mean.tree[OVERWRITE_WITH_GRADIENT]["scale"].dtype == jnp.float32
    loss = lambda t, x: jnp.sum(vary(t, "i", "bfloat16")[OVERWRITE_WITH_GRADIENT] * x)  # noqa: E731
    grads = on_devices(jax.grad(loss))({OVERWRITE_WITH_GRADIENT: jnp.ones((3, 1))}, values)
    np.testing.assert_array_equal(grads[OVERWRITE_WITH_GRADIENT], 7.0)


def test_gradients_that_backward_has_summed_already_are_rejected():
    step = lambda p, x: all_reduce(jax.grad(loss_fn)(p, x), "i", "float32")  # noqa: E731
    told = r"w are the same over 'i': the backward pass summed them .* vary\(params, axis\)"
    with pytest.raises(ValueError, match=told):
        traced(step, PARAMS, BATCH)


@pytest.mark.slow
def test_a_step_rejects_gradients_that_differ_between_devices_where_the_params_do_not():
    tx = mixed_precision(optax.sgd(0.1), "float32")

    def step(params, x):
        grads = jax.grad(loss_fn)(vary(params, "i"), x)
        return apply_gradients(tx, params, tx.init(params), grads)[0]

    told = r"params are the same on all: w over 'i'\. Reduce them first: all_reduce\("
    with pytest.raises(ValueError, match=told):
        traced(step, PARAMS, BATCH)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("named", [None, "i"])
def test_the_step_counts_once_what_types_say_is_the_same_everywhere(named):
    tx = mixed_precision(optax.sgd(0.1), "float32", clip_global_norm=1.0, axis_name=named)

    def step(params, x, sharded):
        grads = all_reduce(jax.grad(loss_fn)(vary(params, "i"), x), "i", "float32")
        both = {**params, "s": sharded}
        return apply_gradients(tx, both, tx.init(both), {**grads, "s": sharded})[2]

    found = traced(step, PARAMS, BATCH, BATCH, in_specs=(EVERYWHERE, SPLIT, SPLIT))
    # the gradients, and the squares of what is sharded: the norm of all is the flag too
    names = [(c.name.rsplit("/", 1)[-1].removesuffix("_invariant"), c.shape) for c in found]
    assert names == [("psum", (4, 2)), ("psum", ())]
    assert sum(c.size for c in found) == 9


def test_what_varies_already_is_left_as_it_is():
    def step(params):
        varying = vary(params, "i")
        assert vary(varying, "i", "bfloat16")["w"] is varying["w"]
        return jax.tree.map(lambda w: lax.psum(w, "i"), varying)

    (only,) = traced(step, PARAMS, in_specs=(EVERYWHERE,))
    assert only.dtype == "float32"


@pytest.mark.slow
def test_complex_gradients_are_summed_as_they_are():
    x = jnp.asarray([[1 + 2j], [3 - 1j]], jnp.complex64)
    loss = lambda w, x: jnp.real(vary(w, "i", "bfloat16") * x)[0]  # noqa: E731
    grads = on_devices(jax.grad(loss))(jnp.ones((2, 1), jnp.complex64), x)
    np.testing.assert_array_equal(grads[0], np.asarray([4 + 1j], np.complex64))
    mean = on_devices(lambda g: all_reduce(g, "i", "bfloat16"))(x)
    assert mean.dtype == jnp.complex64
    np.testing.assert_array_equal(mean[0], np.asarray([2 + 0.5j], np.complex64))


def test_several_axes_are_reduced_at_once():
    values = jnp.arange(6.0).reshape(2, 3)
    once = jax.vmap(lambda g: all_reduce(g, ("a", "b"), "float32"), axis_name="b")
    np.testing.assert_array_equal(jax.vmap(once, axis_name="a")(values), 2.5)
