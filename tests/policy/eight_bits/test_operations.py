"""What matmuls and convolutions in 8 bits have in common: transforms, residuals, derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import ScaledMatmul
from policy.eight_bits.scaled_convolution import scaled_conv
from policy.eight_bits.scaled_matmul import scaled_dot_general

WARNS = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
NUMBERS = ("NHWC", "HWIO", "NHWC")
BY = {
    "int8": ScaledMatmul("int8", "int8"),
    "float8": ScaledMatmul("float8_e4m3fn", "float8_e5m2"),
}


def matmul(by: ScaledMatmul) -> Callable[..., Any]:
    return lambda x, w: scaled_dot_general(x, w, (((1,), (0,)), ((), ())), by)


def convolution(by: ScaledMatmul) -> Callable[..., Any]:
    options: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME"}
    return lambda x, w: scaled_conv(x, w, by, dimension_numbers=NUMBERS, **options)


SHAPES = {matmul: ((64, 256), (256, 32)), convolution: ((4, 7, 6, 32), (3, 2, 32, 24))}
pytestmark = [
    WARNS,
    pytest.mark.parametrize("by", BY.values(), ids=BY),
    pytest.mark.parametrize("made", SHAPES, ids=lambda made: made.__name__),
]


def operands(made: Any, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [jnp.asarray(RNG.standard_normal(shape), dtype) for shape in SHAPES[made]]


def with_gradients(operation: Any, x: Any, w: Any) -> tuple[Any, ...]:
    y, pullback = jax.vjp(operation, x, w)
    return y, *pullback(jnp.cos(y))


def test_jit_vmap_scan_and_checkpoint_compute_the_same(made, by):
    operation, (x, w) = made(by), operands(made)
    plain = with_gradients(operation, x, w)
    step = lambda c, row: (c, with_gradients(operation, row, w))  # noqa: E731
    for ours in (
        jax.jit(lambda *a: with_gradients(operation, *a))(x, w),
        with_gradients(jax.checkpoint(operation), x, w),
        [a[0] for a in jax.vmap(lambda x: with_gradients(operation, x, w))(x[None])],
        [a[0] for a in lax.scan(step, 0, x[None])[1]],
    ):
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_second_derivatives_and_forward_mode_are_refused(made, by):
    operation, (x, w) = made(by), operands(made)

    def loss(w):
        return jnp.sum(operation(x, w) ** 2)

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match="can't be differentiated again, because onl"):
            jax.grad(lambda w, gradient=gradient: jnp.sum(gradient(w)))(w)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (w,), (w,))


def test_residuals_are_codes_and_scales_and_gradients_have_the_operands_dtypes(made, by):
    operation, (x, w) = made(by), operands(made, jnp.bfloat16)
    saved = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(operation, x, w)[1], x, w))
    assert {leaf.dtype for leaf in saved if leaf.size > 256} == {by.operands}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in saved) < 0.55 * 2 * (x.size + w.size)
    found = with_gradients(operation, x, w.astype(jnp.float32))
    assert [a.dtype for a in found] == [jnp.float32, jnp.bfloat16, jnp.float32]
