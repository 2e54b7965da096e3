"""Convolutions in 8 bits: errors against float64, gradients, what is saved, and refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import ScaledMatmul
from policy.eight_bits import quantisation, scaled_convolution
from policy.eight_bits.scaled_convolution import scaled_conv
from tests.policy.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

INT8 = ScaledMatmul("int8", "int8")
FLOAT8 = ScaledMatmul("float8_e4m3fn", "float8_e5m2")
NUMBERS = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 7, 6, 32)).astype(np.float32)
KERNEL = RNG.standard_normal((3, 2, 32, 24)).astype(np.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": ((1, 1), (0, 2)), "rhs_dilation": (2, 1)},
    "dilated": {"window_strides": (1, 1), "padding": ((0, 0), (1, 1)), "lhs_dilation": (1, 2)},
    "grouped": {"window_strides": (1, 1), "padding": "VALID", "feature_group_count": 4},
}


def results(convolve, x, kernel, ct):
    y, pullback = jax.vjp(convolve, x, kernel)
    return y, *pullback(ct)


def case(name: str) -> tuple[Any, ...]:
    """Returns options, operands, a cotangent, and the float64 result and gradients."""
    options: dict[str, Any] = OPTIONS[name] | {"dimension_numbers": NUMBERS}
    kernel = KERNEL[:, :, :8] if name == "grouped" else KERNEL
    with jax.enable_x64(True):
        convolve: Any = functools.partial(lax.conv_general_dilated, **options)
        wide: Any = [jnp.asarray(a, jnp.float64) for a in (X, kernel)]
        ct = RNG.standard_normal(jax.eval_shape(convolve, wide[0], wide[1]).shape)
        truth = [np.asarray(a) for a in results(convolve, wide[0], wide[1], jnp.asarray(ct))]
    return options, X, kernel, ct.astype(np.float32), truth


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("by", "bound"), [(INT8, 0.015), (FLOAT8, 0.045)], ids=["int8", "float8"])
def test_errors_are_those_of_rounding_to_8_bits(by, bound, name):
    options, x, kernel, ct, truth = case(name)
    found = results(lambda x, k: scaled_conv(x, k, by, **options), x, kernel, ct)
    for ours, true in zip(found, truth, strict=True):
        assert ours.dtype == jnp.float32
        assert 0.002 < relative(ours, true) < bound


def test_an_example_that_is_small_keeps_its_digits():
    """By tensor, an example below 1/254 of the largest one is lost."""
    scales = np.asarray([1, 1e-3, 1e3, 30], np.float32)[:, None, None, None]
    options, x, kernel, _, truth = case("same")
    worst = {}
    for scaling in ("row", "tensor"):
        by = ScaledMatmul("int8", "int8", scaling=scaling)
        y = np.asarray(scaled_conv(jnp.asarray(x * scales), jnp.asarray(kernel), by, **options))
        worst[scaling] = max(map(relative, y / scales, truth[0]))
    assert worst["row"] < 0.015
    assert worst["tensor"] > 0.5


def test_a_weight_gradient_in_compute_dtype_is_exact_of_the_operands():
    options, x, kernel, ct, truth = case("strided")
    by = ScaledMatmul("int8", "int8", weight_gradient="compute")
    _, _, by_kernel = results(lambda x, k: scaled_conv(x, k, by, **options), x, kernel, ct)
    assert relative(by_kernel, truth[2]) < 1e-6


@pytest.mark.parametrize("by", [INT8, FLOAT8], ids=["int8", "float8"])
def test_not_finite_stays_not_finite_in_its_example(by):
    options, x, kernel, ct, _ = case("same")
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[1, 0, 0, 0] = bad
        y, dx, dk = results(lambda x, k: scaled_conv(x, k, by, **options), broken, kernel, ct)
        assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, axis=0)).all()
        assert np.isfinite(dx).all() and np.isnan(dk).all()


@pytest.mark.parametrize(
    ("backend", "by", "message", "of_int32"),
    [
        (("gpu", "9.0"), FLOAT8, "9.0 has no float8_e4m3fn convolutions, so they are emu", 0),
        (("gpu", "9.0"), INT8, "9.0 has no int8 convolutions, so they are emu", 0),
        (("tpu", "TPU v5 lite"), INT8, None, 1),
    ],
)
def test_a_backend_without_such_convolutions_emulates_them_with_a_warning(
    monkeypatch, recwarn, backend, by, message, of_int32
):
    for module in (quantisation, scaled_convolution):
        monkeypatch.setattr(module, "backend", lambda: backend)
    options, x, kernel, _, _ = case("same")
    text = str(jax.make_jaxpr(lambda x, k: scaled_conv(x, k, by, **options))(x, kernel))
    assert text.count("preferred_element_type=int32") == of_int32
    assert [message in str(w.message) for w in recwarn] == ([] if message is None else [True])
