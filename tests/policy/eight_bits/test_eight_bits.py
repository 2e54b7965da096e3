"""Matmuls and convolutions in 8 bits: errors beside float64, gradients, residuals, rejections."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy.core.dtypes import ScaledMatmul, scaled_matmul_of
from policy.core.einsums import dot_of_einsum
from policy.core.messages import DtypePolicyWarning
from policy.eight_bits import quantization, scaled_convolution
from policy.eight_bits.quantization import quantize, quantize_for, shared_operands, warn_if_emulated
from policy.eight_bits.scaled_convolution import scaled_conv
from policy.eight_bits.scaled_matmul import scaled_dot_general
from tests.policy.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
MATMUL = (((1,), (0,)), ((), ()))
kinds = pytest.mark.parametrize("kind", ("f8", "i8"))


def scaled(text: str) -> ScaledMatmul:
    by = scaled_matmul_of(text)
    assert by is not None
    return by


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def results(operation: Any, x: Any, w: Any, ct: Any = None) -> tuple[Any, ...]:
    """Returns the result of an operation and both gradients."""
    y, pullback = jax.vjp(operation, x, w)
    return y, *pullback(jnp.cos(y) if ct is None else jnp.asarray(ct, y.dtype))


@pytest.mark.cases(fast=2)
@kinds
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 1e-30, 1.0, 3e38])
def test_any_size_of_number_has_a_finite_scale_and_codes(kind, size):
    found = quantize(jnp.asarray([[size, -size / 2]], jnp.float32), (1,), scaled(kind).operands)
    assert found.scale.shape == (1, 1) and 2.0**-126 <= float(found.scale[0, 0]) < np.inf
    assert bool(jnp.all(jnp.isfinite(found.qvalue.astype(jnp.float32))))
    back = np.asarray(found.qvalue, np.float64) * np.asarray(found.scale, np.float64)
    assert np.allclose(back, [[size, -size / 2]], rtol=0.07, atol=2.0**-126)


@pytest.mark.slow
def test_float8_scales_are_powers_of_two_and_int8s_are_exact():
    x = normal(16, 8) * 100
    powers = np.log2(np.asarray(quantize(x, (1,), scaled("f8").operands).scale))
    assert np.array_equal(powers, np.round(powers))
    found = quantize(x, (1,), scaled("i8").operands)
    assert np.asarray(jnp.max(jnp.abs(found.qvalue), axis=1)).tolist() == [127] * 16


def test_a_backend_without_8_bit_matmuls_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_emulated(scaled("f8"))
        warn_if_emulated(scaled("f8"))
    assert [w.category for w in caught] == [DtypePolicyWarning]
    assert "cpu has no float8_e4m3fn matmuls" in str(caught[0].message)


def matmul(by: ScaledMatmul) -> Callable[..., Any]:
    return lambda x, w: scaled_dot_general(x, w, MATMUL, by)


def convolution(by: ScaledMatmul) -> Callable[..., Any]:
    return lambda x, w: scaled_conv(x, w, by, **CONVOLUTIONS["same"])


SHAPES = {matmul: ((64, 256), (256, 32)), convolution: ((4, 7, 6, 32), (3, 2, 32, 24))}
made_in = pytest.mark.parametrize("made", SHAPES, ids=lambda made: made.__name__)


def operands(made: Any, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [normal(*shape, dtype=dtype) for shape in SHAPES[made]]


@pytest.mark.cases(slow=1)
@kinds
@made_in
def test_jit_vmap_scan_and_checkpoint_compute_the_same(made, kind):
    operation, (x, w) = made(scaled(kind)), operands(made)
    plain = results(operation, x, w)
    step = lambda c, row: (c, results(operation, row, w))  # noqa: E731
    for ours in (
        jax.jit(lambda *a: results(operation, *a))(x, w),
        results(jax.checkpoint(operation), x, w),
        [a[0] for a in jax.vmap(lambda x: results(operation, x, w))(x[None])],
        [a[0] for a in lax.scan(step, 0, x[None])[1]],
    ):
        for a, b in zip(ours, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.cases(slow=3)
@kinds
@made_in
def test_second_derivatives_and_forward_mode_are_rejected(made, kind):
    operation, (x, w) = made(scaled(kind)), operands(made)

    def loss(w):
        return jnp.sum(operation(x, w) ** 2)

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match="can't be differentiated again, because onl"):
            jax.grad(lambda w, gradient=gradient: jnp.sum(gradient(w)))(w)
    for forward in (loss, jax.jit(loss), jax.checkpoint(loss), jax.grad(loss)):
        with pytest.raises(
            NotImplementedError, match=r"in forward mode .*reverse mode.*without m="
        ):
            jax.jvp(forward, (w,), (w,))
    with pytest.raises(NotImplementedError, match="in forward mode"):
        jax.linearize(loss, w)[1](w)
    with pytest.raises(NotImplementedError, match="in forward mode"):
        jax.jacfwd(loss)(w)


@pytest.mark.cases(slow=1)
@kinds
@made_in
def test_residuals_are_codes_and_scales_and_gradients_have_the_operands_dtypes(made, kind):
    by = scaled(kind)
    operation, (x, w) = made(by), operands(made, jnp.bfloat16)
    saved = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(operation, x, w)[1], x, w))
    assert {leaf.dtype for leaf in saved if leaf.size > 256} == {by.operands}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in saved) < 0.55 * 2 * (x.size + w.size)
    found = results(operation, x, w.astype(jnp.float32))
    assert [a.dtype for a in found] == [jnp.float32, jnp.bfloat16, jnp.float32]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "forward"), [("f8", 0.045), ("i8", 0.015)])
def test_gaussian_operands_are_within_the_published_errors(kind, forward):
    x, w, ct = (normal(512, 512) for _ in range(3))
    run = lambda x, w: scaled_dot_general(x, w, MATMUL, scaled(kind)).astype(x.dtype)  # noqa: E731
    y, dx, dw = results(run, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), ct)
    wide = [np.asarray(a, np.float64) for a in (x, w, ct)]
    assert relative(y, wide[0] @ wide[1]) <= forward
    assert relative(dx, wide[2] @ wide[1].T) <= 0.065
    assert relative(dw, wide[0].T @ wide[2]) <= 0.065
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16


@pytest.mark.slow
@kinds
def test_of_rows_that_differ_in_size_a_scale_for_each_keeps_the_worst(kind):
    x, w = normal(512, 512) * jnp.exp(4 * normal(512, 1)), normal(512, 512)
    truth = np.asarray(x, np.float64) @ np.asarray(w)

    def worst(by: ScaledMatmul) -> float:
        y = np.asarray(scaled_dot_general(x, w, MATMUL, by), np.float64)
        return float(np.max(np.linalg.norm(y - truth, axis=1) / np.linalg.norm(truth, axis=1)))

    assert worst(scaled(kind)) <= 0.065
    assert worst(scaled(f"{kind}:tensor")) > 0.9


@pytest.mark.cases(slow=3)
@kinds
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_not_finite_stays_not_finite_in_its_row_alone(kind, bad):
    x = normal(4, 8).at[2, 3].set(bad)
    y = np.asarray(scaled_dot_general(x, normal(8, 3), MATMUL, scaled(kind)))
    assert np.array_equal(np.isnan(y), np.arange(4)[:, None] == np.full((1, 3), 2))


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        ((((2,), (0,)), ((), ())), ((2, 4, 8), (8, 3, 5))),
        ((((0, 1), (1, 0)), ((), ())), ((4, 8, 2), (8, 4, 3))),
        ((((1, 3), (2, 0)), ((0,), (1,))), ((3, 8, 5, 6), (6, 3, 8, 7))),
    ],
)
@pytest.mark.parametrize("text", ["i8", "i8:tensor", "i8:compute"])
def test_any_dimension_numbers_have_their_gradients(numbers, shapes, text):
    lhs, rhs = (normal(*shape) for shape in shapes)
    ours = functools.partial(scaled_dot_general, dimension_numbers=numbers, by=scaled(text))
    theirs = functools.partial(lax.dot_general, dimension_numbers=numbers)
    ct = normal(*jax.eval_shape(theirs, lhs, rhs).shape)
    pairs = zip(results(ours, lhs, rhs, ct), results(theirs, lhs, rhs, ct), strict=True)
    for found, true in pairs:
        assert found.shape == true.shape
        assert relative(found, np.asarray(true, np.float64)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["lhs", "rhs"])
def test_a_weight_gradient_in_compute_dtype_is_not_rounded_to_8_bits(weight):
    lhs, rhs, ct = (normal(64, 64, dtype=jnp.bfloat16) for _ in range(3))

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return scaled_dot_general(a, b, MATMUL, scaled("f8:compute"), weight=weight).astype(a.dtype)

    gradients = zip(results(run, lhs, rhs, ct), results(jnp.matmul, lhs, rhs, ct), strict=True)
    for i, (found, true) in enumerate([*gradients][1:]):
        off = relative(found, np.asarray(true, np.float64))
        assert (off < 0.004) == (i == ("lhs", "rhs").index(weight)) and off < 0.08


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("subscripts", "shapes", "is_one"),
    [
        ("ab,bc->ac", ((3, 4), (4, 5)), True),
        ("...a,abc->...bc", ((2, 3, 4), (4, 5, 6)), True),
        ("b q h d, h d o -> o b q", ((2, 3, 4, 5), (4, 5, 6)), True),
        ("abc,acd->bda", ((2, 3, 4), (2, 4, 5)), True),
        ("aab,bc->ac", ((3, 3, 4), (4, 5)), False),
        ("ab,bc->a", ((3, 4), (4, 5)), False),
        ("ab,bc", ((3, 4), (4, 5)), False),
    ],
)
def test_an_einsum_is_one_matmul_or_left_to_the_caller(subscripts, shapes, is_one):
    lhs, rhs = (normal(*shape) for shape in shapes)
    found = dot_of_einsum(subscripts, lhs.ndim, rhs.ndim)
    assert (found is not None) == is_one
    if found is not None:
        found = jnp.transpose(scaled_dot_general(lhs, rhs, found[0], scaled("i8")), found[1])
        truth = np.einsum(subscripts.replace(" ", ""), np.asarray(lhs, np.float64), rhs)
        assert relative(found, truth) < 0.02


def test_a_shared_operand_is_quantized_once():
    x, w, by = jnp.ones((2, 3)), jnp.ones((3, 2)), scaled("f8")

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        with shared_operands():
            return scaled_dot_general(x, w, MATMUL, by) + scaled_dot_general(x, 2 * w, MATMUL, by)

    casts = str(jax.make_jaxpr(run)(x, w)).count("new_dtype=float8_e4m3fn")
    assert casts == 3  # x, and two weights
    first = quantize_for(x, (1,), by)
    assert quantize_for(x, (1,), by) is not first


def test_an_operand_that_a_checkpoint_quantized_is_quantized_again_outside_of_it():
    x, w, by = jnp.ones((2, 3)), jnp.ones((3, 2)), scaled("i8")

    def run(x: jax.Array) -> jax.Array:
        with shared_operands():
            inside = jax.checkpoint(lambda: scaled_dot_general(x, w, MATMUL, by))()
            return inside + scaled_dot_general(x, w, MATMUL, by)

    assert jnp.allclose(jax.jit(run)(x), 6, rtol=0.01)
    assert jnp.allclose(jax.grad(lambda x: run(x).sum())(x), 4, rtol=0.01)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("platform", "kind"), [("cuda", "f8"), ("tpu", "f8"), ("tpu", "i8")])
def test_exported_programs_multiply_in_8_bits_three_times(platform, kind):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (scaled_dot_general(x, w, MATMUL, scaled(kind)).astype(x.dtype) ** 2).sum()

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 16)))
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(*shapes)
    lines = exported.mlir_module().splitlines()
    dots = [line for line in lines if "stablehlo.dot_general" in line]
    assert len(dots) == 3
    for line in dots:
        operands = line.split(" : (")[1].split(") ->")[0].split(", ")
        assert all(one.endswith(("xf8E4M3FN>", "xf8E5M2>", "xi8>")) for one in operands)


NUMBERS = ("NHWC", "HWIO", "NHWC")
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    name: {"dimension_numbers": NUMBERS, "window_strides": (1, 1)} | options
    for name, options in {
        "same": {"padding": "SAME"},
        "strided": {"window_strides": (2, 1), "padding": ((1, 1), (0, 2)), "rhs_dilation": (2, 1)},
        "dilated": {"padding": ((0, 0), (1, 1)), "lhs_dilation": (1, 2)},
        "grouped": {"padding": "VALID", "feature_group_count": 4},
        "examples elsewhere": {"padding": "SAME", "dimension_numbers": (*NUMBERS[:2], "HCNW")},
    }.items()
}


def case(name: str) -> tuple[Any, ...]:
    """Returns options, operands, a cotangent, and the float64 result and gradients."""
    options = CONVOLUTIONS[name]
    x, kernel = normal(4, 7, 6, 32), normal(3, 2, 8 if name == "grouped" else 32, 24)
    with jax.enable_x64(True):
        convolve: Any = functools.partial(lax.conv_general_dilated, **options)
        wide: list[Any] = [jnp.asarray(a, jnp.float64) for a in (x, kernel)]
        ct = RNG.standard_normal(jax.eval_shape(convolve, wide[0], wide[1]).shape)
        truth = [np.asarray(a) for a in results(convolve, wide[0], wide[1], ct)]
    return options, x, kernel, ct.astype(np.float32), truth


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("kind", "bound"), [("i8", 0.015), ("f8", 0.045)])
def test_errors_are_those_of_rounding_to_8_bits(kind, bound, name):
    options, x, kernel, ct, truth = case(name)
    found = results(lambda x, k: scaled_conv(x, k, scaled(kind), **options), x, kernel, ct)
    for ours, true in zip(found, truth, strict=True):
        assert ours.dtype == jnp.float32
        assert 0.002 < relative(ours, true) < bound


def test_an_example_that_is_small_keeps_its_digits():
    """By tensor, an example below 1/254 of the largest one is lost."""
    scales = np.asarray([1, 1e-3, 1e3, 30], np.float32)[:, None, None, None]
    options, x, kernel, _, truth = case("same")
    worst = {}
    for text in ("i8", "i8:tensor"):
        y = np.asarray(scaled_conv(x * scales, kernel, scaled(text), **options))
        worst[text] = max(map(relative, y / scales, truth[0]))
    assert worst["i8"] < 0.015 and worst["i8:tensor"] > 0.5


@pytest.mark.slow
def test_a_kernels_gradient_in_compute_dtype_is_exact_of_the_operands():
    options, x, kernel, ct, truth = case("strided")
    run = lambda x, k: scaled_conv(x, k, scaled("i8:compute"), **options)  # noqa: E731
    assert relative(results(run, x, kernel, ct)[2], truth[2]) < 1e-6


@pytest.mark.cases(fast=1)
@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_stays_not_finite_in_its_example(kind, bad):
    options, x, kernel, ct, _ = case("same")
    run = lambda x, k: scaled_conv(x, k, scaled(kind), **options)  # noqa: E731
    y, dx, dk = results(run, x.at[1, 0, 0, 0].set(bad), kernel, ct)
    assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, axis=0)).all()
    assert np.isfinite(dx).all() and np.isnan(dk).all()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("backend", "kind", "message", "of_int32"),
    [
        (("gpu", "9.0"), "f8", "9.0 has no float8_e4m3fn convolutions, so they are emu", 0),
        (("gpu", "9.0"), "i8", "9.0 has no int8 convolutions, so they are emu", 0),
        (("tpu", "TPU v5 lite"), "i8", None, 1),
    ],
)
def test_a_backend_without_such_convolutions_emulates_them_with_a_warning(
    monkeypatch, recwarn, backend, kind, message, of_int32
):
    for module in (quantization, scaled_convolution):
        monkeypatch.setattr(module, "backend", lambda: backend)
    run = convolution(scaled(kind))
    text = str(jax.make_jaxpr(run)(*operands(convolution)))
    assert text.count("preferred_element_type=int32") == of_int32
    assert [message in str(w.message) for w in recwarn] == ([] if message is None else [True])
