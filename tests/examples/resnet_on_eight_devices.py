"""The ResNet example on eight devices, for `test_resnet_fashion_mnist.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resnet_fashion_mnist as job
from jax.sharding import AxisType

import policy as mp

RNG = np.random.default_rng(0)
MODEL = job.ResNet((1,), job.ResNetBlock, num_filters=4, small_images=True)
IMAGES = RNG.normal(size=(32, 8, 8, 1)).astype(np.float32)
LABELS = (np.arange(32) % 10).astype(np.int32)
LOSS = job.make_loss(MODEL, 1e-4)
RATE = 0.5


def optimizer() -> Any:
    return mp.mixed_precision(optax.sgd(RATE), mp.current_policy() or "float32")


@functools.cache
def initial() -> Any:
    """Variables as numpy arrays: a step donates what is made of them."""
    init = jax.jit(functools.partial(MODEL.init, train=False))
    return jax.device_get(init(jax.random.key(0), IMAGES[:1]))


def created() -> job.TrainState:
    variables = jax.tree.map(jnp.asarray, initial())
    opt_state = optimizer().init(variables["params"])
    return job.TrainState(variables["params"], variables["batch_stats"], opt_state)


def trained(
    devices: int, steps: int, all_reduce_dtype: str | None = None
) -> tuple[job.TrainState, list[float]]:
    axes: dict[str, Any] = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:devices]}
    mesh = jax.make_mesh((devices,), ("batch",), **axes)
    step, state, losses = job.make_step(LOSS, optimizer(), mesh, all_reduce_dtype), created(), []
    for _ in range(steps):
        state, loss, _ = step(state, IMAGES, LABELS)
        losses.append(float(loss))
    return jax.device_get(state), losses


def worst(a: Any, b: Any) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


def test_under_jit_eight_devices_equal_one_to_float32_rounding():
    with mp.use_policy("float32"):
        one, losses_of_one = trained(1, 4)
        eight, losses = trained(8, 4)
    assert losses_of_one[-1] < losses_of_one[0] - 0.05
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-6)
    assert worst(eight.params, one.params) < 2e-6  # weights are up to 1
    assert worst(eight.batch_stats, one.batch_stats) < 2e-6  # synchronized


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-6), ("bf16", 2.0**-8)])
def test_with_all_reduce_dtype_a_step_takes_the_mean_of_what_each_device_finds_in_its_part(
    dtype, bound
):
    with mp.use_policy("float32"):
        start = created()
        after, (loss,) = trained(8, 1, dtype)
        parts = [(IMAGES[i : i + 4], LABELS[i : i + 4]) for i in range(0, 32, 4)]
        of_part = jax.jit(jax.value_and_grad(LOSS, has_aux=True))
        found = [of_part(start.params, start.batch_stats, *part) for part in parts]
    mean: Any = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *found)
    (mean_loss, mean_statistics), mean_gradient = mean
    np.testing.assert_allclose(loss, mean_loss, rtol=1e-6)
    assert worst(after.batch_stats, mean_statistics) < 1e-6
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(mean_gradient))
    moved = lambda old, new: (old - new) / RATE  # noqa: E731
    gradient = jax.tree.map(moved, jax.device_get(start.params), after.params)
    assert worst(gradient, mean_gradient) < bound * largest


def test_gradients_cross_devices_in_the_dtype_that_was_asked_for():
    mesh = job.make_mesh()
    with mp.use_policy("mixed_bfloat16"):
        state = created()
        step = job.make_step(LOSS, optimizer(), mesh, "bf16")
        sent = mp.sharding.collectives_of(step, state, IMAGES, LABELS, stage="traced")
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1}
    kernels = [exchange for exchange in sent if exchange.shape in shapes]
    assert len(kernels) >= len(shapes) and {exchange.dtype for exchange in kernels} == {"bfloat16"}
    assert {exchange.dtype for exchange in sent if exchange.shape == ()} == {"float32"}  # the loss
