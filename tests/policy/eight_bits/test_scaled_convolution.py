"""Convolutions in 8 bits: errors against float64, gradients, what is saved, and refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import DtypePolicyWarning, ScaledMatmul
from policy.eight_bits import quantisation, scaled_convolution
from policy.eight_bits.scaled_convolution import scaled_conv

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


def error(found, truth):
    return float(np.linalg.norm(np.asarray(found, np.float64) - truth) / np.linalg.norm(truth))


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
        assert 0.002 < error(ours, true) < bound


def test_an_example_that_is_small_keeps_its_digits():
    """By tensor, an example below 1/254 of the largest one is lost."""
    scales = np.asarray([1, 1e-3, 1e3, 30], np.float32)[:, None, None, None]
    options, x, kernel, _, truth = case("same")
    worst = {}
    for scaling in ("row", "tensor"):
        by = ScaledMatmul("int8", "int8", scaling=scaling)
        y = np.asarray(scaled_conv(jnp.asarray(x * scales), jnp.asarray(kernel), by, **options))
        worst[scaling] = max(map(error, y / scales, truth[0]))
    assert worst["row"] < 0.015
    assert worst["tensor"] > 0.5


def test_a_weight_gradient_in_compute_dtype_is_exact_of_the_operands():
    options, x, kernel, ct, truth = case("strided")
    by = ScaledMatmul("int8", "int8", weight_gradient="compute")
    _, _, by_kernel = results(lambda x, k: scaled_conv(x, k, by, **options), x, kernel, ct)
    assert error(by_kernel, truth[2]) < 1e-6


@pytest.mark.parametrize("by", [INT8, FLOAT8], ids=["int8", "float8"])
def test_not_finite_stays_not_finite_in_its_example(by):
    options, x, kernel, ct, _ = case("same")
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[1, 0, 0, 0] = bad
        y, dx, dk = results(lambda x, k: scaled_conv(x, k, by, **options), broken, kernel, ct)
        assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, axis=0)).all()
        assert np.isfinite(dx).all() and np.isnan(dk).all()


def test_backward_saves_codes_and_scales():
    options, x, kernel, _, _ = case("same")
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, kernel)]
    _, pullback = jax.vjp(lambda x, k: scaled_conv(x, k, INT8, **options), *half)
    saved = jax.tree.leaves(pullback)
    dtypes = {leaf.dtype for leaf in saved if leaf.size > 100}
    assert dtypes == {np.dtype(np.int8)}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in saved) < 0.55 * 2 * (
        x.size + kernel.size
    )


def test_gradients_have_the_operands_dtypes():
    options, x, kernel, ct, _ = case("same")
    found = results(
        lambda x, k: scaled_conv(x, k, INT8, **options), x.astype(jnp.bfloat16), kernel, ct
    )
    assert [a.dtype for a in found] == [jnp.float32, jnp.bfloat16, jnp.float32]


def test_transforms():
    options, x, kernel, ct, _ = case("same")

    def convolve(x, k):
        return scaled_conv(x, k, INT8, **options)

    plain = results(convolve, x, kernel, ct)
    remade = results(jax.checkpoint(convolve), x, kernel, ct)
    jitted = jax.jit(lambda *a: results(convolve, *a))(x, kernel, ct)
    mapped = jax.vmap(lambda x, ct: results(convolve, x, kernel, ct))(x[None], ct[None])
    for ours in (remade, jitted, [a[0] for a in mapped]):
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_a_second_derivative_is_refused():
    options, x, kernel, _, _ = case("same")

    def slope(k):
        return jnp.sum(jax.grad(lambda k: jnp.sum(scaled_conv(x, k, INT8, **options) ** 2))(k))

    with pytest.raises(
        NotImplementedError, match="can't be differentiated again, because only its 8-bit operands"
    ):
        jax.grad(slope)(kernel)


@pytest.mark.parametrize(
    ("backend", "by", "name"),
    [(("gpu", "9.0"), FLOAT8, "float8_e4m3fn"), (("gpu", "9.0"), INT8, "int8")],
)
def test_a_gpu_emulates_convolutions_and_a_warning_says_so(monkeypatch, backend, by, name):
    for module in (quantisation, scaled_convolution):
        monkeypatch.setattr(module, "backend", lambda: backend)
    options, x, kernel, _, _ = case("same")
    with pytest.warns(DtypePolicyWarning, match=f"9.0 has no {name} convolutions, so they are emu"):
        text = str(jax.make_jaxpr(lambda x, k: scaled_conv(x, k, by, **options))(x, kernel))
    assert ("preferred_element_type=int32" in text) is False


def test_a_tpu_v5e_convolves_int8_without_a_warning(monkeypatch, recwarn):
    for module in (quantisation, scaled_convolution):
        monkeypatch.setattr(module, "backend", lambda: ("tpu", "TPU v5 lite"))
    options, x, kernel, _, _ = case("same")
    text = str(jax.make_jaxpr(lambda x, k: scaled_conv(x, k, INT8, **options))(x, kernel))
    assert not recwarn.list
    assert text.count("preferred_element_type=int32") == 1
