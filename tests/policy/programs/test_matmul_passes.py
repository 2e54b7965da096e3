"""Emulated passes of float32 matmuls, beside NumPy's products of rounded operands."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from benchmarks.accel.emulated import emulated

X, Y = (np.asarray(jax.random.normal(jax.random.key(i), (16, 16))) for i in range(2))


def in_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def in_tf32(x):
    """Rounds to 10 explicit bits, to even."""
    bits = x.view(np.uint32)
    bits = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def product(x, y):
    return x.astype(np.float64) @ y.astype(np.float64)


def in_three_passes(x, y):
    (x0, x1), (y0, y1) = ((in_bfloat16(z), in_bfloat16(z - in_bfloat16(z))) for z in (x, y))
    return product(x0, y0) + product(x0, y1) + product(x1, y0)


ONE_PASS, TF32 = product(in_bfloat16(X), in_bfloat16(Y)), product(in_tf32(X), in_tf32(Y))
EXACT, LEFT, RIGHT = product(X, Y), product(X, in_bfloat16(Y)), product(in_bfloat16(X), Y)


# A TPU splits each operand by its own precision; on a GPU the higher one holds for both.
@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("device", "precision", "truth", "tolerance"),
    [
        ("tpu", None, ONE_PASS, 2e-6),
        ("tpu", "default", ONE_PASS, 2e-6),
        ("tpu", "high", in_three_passes(X, Y), 2e-6),
        ("tpu", "highest", EXACT, 2e-6),
        *(("tpu", (higher, "default"), LEFT, 1e-4) for higher in ("high", "highest")),
        *(("tpu", ("default", higher), RIGHT, 1e-4) for higher in ("high", "highest")),
        ("gpu", None, TF32, 2e-6),
        ("gpu", "high", TF32, 2e-6),
        ("gpu", "highest", EXACT, 2e-6),
        *(("gpu", pair, TF32, 2e-6) for pair in (("high", "default"), ("default", "high"))),
        *(("gpu", pair, EXACT, 2e-6) for pair in (("highest", "default"), ("default", "highest"))),
    ],
)
def test_a_matmul_is_the_product_of_rounded_operands(device, precision, truth, tolerance):
    fn = emulated(lambda x, y: jnp.dot(x, y, precision=precision), device)
    for run in (fn, jax.jit(fn)):
        np.testing.assert_allclose(run(X, Y), truth, rtol=1e-5, atol=tolerance)


@jax.custom_jvp
def with_its_own_tangent(x):
    return x @ Y


with_its_own_tangent.defjvp(lambda x, dx: (with_its_own_tangent(*x), dx[0] @ Y))


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize(
    "around",
    [
        lambda fn: jax.jit(fn),
        lambda fn: jax.checkpoint(fn),
        lambda fn: lambda x: lax.cond(x.sum() > 1e9, lambda x: x, fn, x),
        lambda fn: lambda x: lax.map(fn, x[None])[0],
        lambda fn: jax.vmap(fn),
        lambda _: with_its_own_tangent,
        lambda _: lambda x: lax.ragged_dot(x, jnp.asarray(Y[None]), jnp.array([16])),
    ],
    ids=["jit", "checkpoint", "cond", "map", "vmap", "custom_jvp", "ragged_dot"],
)
def test_matmuls_inside_of_programs_are_rounded_too(around):
    found = emulated(around(lambda x: x @ Y), "tpu")(X)
    np.testing.assert_allclose(found, ONE_PASS, rtol=1e-5, atol=2e-6)


def test_a_gradient_is_rounded_in_its_own_matmuls():
    weights = np.asarray(jax.random.normal(jax.random.key(2), (16, 16)))
    found = emulated(jax.grad(lambda x: (weights * (x @ Y)).sum()), "tpu")(X)
    truth = product(in_bfloat16(weights), in_bfloat16(Y).T)
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=2e-6)


def test_other_matmuls_and_devices():
    half = jnp.asarray(X, jnp.bfloat16)
    np.testing.assert_array_equal(emulated(jnp.dot, "tpu")(half, half), half @ half)
    kernel, image = Y[:3, :, None], X[None]
    conv = lambda x, k: lax.conv_general_dilated(  # noqa: E731
        x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    found = emulated(conv, "tpu")(image, kernel)
    rounded = conv(in_bfloat16(image), in_bfloat16(kernel))
    np.testing.assert_allclose(found, rounded, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match="'npu'"):
        emulated(jnp.dot, "npu")  # type: ignore[arg-type]
