"""Formats with blocks: values beside NumPy and ml_dtypes by the specifications, and programs."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policy.core.dtypes import ScaledMatmul, scaled_matmul_of
from policy.eight_bits.blocks import quantize_in_blocks
from policy.eight_bits.scaled_matmul import scaled_dot_general
from tests.policy.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
MATMUL = (((1,), (0,)), ((), ()))
TEXTS = ("mxfp8", "mxfp8_up", "f8:mxfp8", "nvfp4")
texts = pytest.mark.parametrize("text", TEXTS)
F32 = np.float32


def scaled(text: str) -> ScaledMatmul:
    by = scaled_matmul_of(text)
    assert by is not None
    return by


def microscaled(x: np.ndarray, dtype: Any, rounds_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and scales of blocks (..., 32), as OCP MX v1.0, section 6.3, has it.

    The shared exponent is floor(log2(largest)) - emax: that of the largest number's power of two
    beside the dtype's. Rounded up (arXiv:2506.08027), it is ceil(log2(largest / limit)).
    """
    limit = float(ml_dtypes.finfo(dtype).max)
    largest = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
    safe = np.where(largest == 0, 1, largest)
    exact = np.log2(safe / limit) if rounds_up else np.floor(np.log2(safe))
    exponent = np.ceil(exact) if rounds_up else exact - math.floor(math.log2(limit))
    exponent = np.maximum(np.where(largest == 0, -127, exponent), -127)
    codes = np.clip(x.astype(np.float64) / 2.0**exponent, -limit, limit).astype(dtype)
    return codes, (2.0**exponent).astype(ml_dtypes.float8_e8m0fnu)


def nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, scales and the array's scale of blocks (..., 16): arXiv:2509.25149, C.1-C.4.

    All steps are in float32.
    """
    largest = np.abs(x).max(-1, keepdims=True).astype(F32)
    encode = F32(6 * 448) / largest.max()
    decode = F32(1) / encode
    scale = np.minimum(largest / F32(6) * encode, F32(448)).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(F32(1) / (scale.astype(F32) * decode), np.finfo(F32).max)
    codes = np.clip(x * inverse, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn)
    return codes, scale, decode


def reference(x: np.ndarray, by: ScaledMatmul, dtype: Any) -> tuple[np.ndarray, ...]:
    """Returns codes (rows, contracted), scales (rows, blocks), and the numbers in float64."""
    assert by.blocks is not None
    rows, size = len(x), by.blocks.size
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(rows, -1, size)
    codes, scale, *outer = (
        nvfp4(padded) if size == 16 else microscaled(padded, dtype, by.blocks.rounds_up)
    )
    numbers = codes.astype(np.float64) * scale.astype(np.float64)
    numbers = numbers * np.float64(outer[0] if outer else 1)
    return codes.reshape(rows, -1), scale[..., 0], numbers.reshape(rows, -1)[:, : x.shape[1]]


def blocks_of(x: np.ndarray, by: ScaledMatmul, dtype: Any = None) -> Any:
    assert by.blocks is not None
    return quantize_in_blocks(
        jnp.asarray(x), ((), (0,), (1,)), jnp.dtype(dtype or by.operands), by.blocks
    )


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def hard_numbers(by: ScaledMatmul) -> np.ndarray:
    """Returns rows of many sizes, of ties between codes and between scales, and of zeros."""
    gaussian = RNG.standard_normal((64, 160)) * np.exp(3 * RNG.standard_normal((64, 1)))
    halves = np.arange(64 * 160).reshape(64, 160) / 2.0**7
    powers = 2.0 ** RNG.integers(-100 if by.scaling != "nvfp4" else -6, 9, (64, 160))
    zeros = np.zeros((2, 160))
    rows = np.concatenate([gaussian, halves, powers, zeros])
    return rows.astype(F32)


@pytest.mark.cases(fast=1)
@texts
@pytest.mark.parametrize("rounded", [F32, ml_dtypes.bfloat16])
def test_codes_and_scales_are_those_of_the_specification(text, rounded):
    by = scaled(text)
    x = hard_numbers(by).astype(rounded)
    for dtype in {by.operands, by.gradients}:
        codes, scale, _ = reference(x.astype(F32), by, dtype)
        for found in (blocks_of(x, by, dtype), jax.jit(lambda x, d=dtype: blocks_of(x, by, d))(x)):
            assert found.qvalue.dtype == dtype and found.scale.dtype.name == scale.dtype.name
            np.testing.assert_array_equal(bits(found.scale[0]), bits(scale))
            np.testing.assert_array_equal(bits(found.qvalue[0]), bits(codes))


def rounded(x: Any, by: ScaledMatmul, dtype: Any = None) -> np.ndarray:
    return reference(np.asarray(x, F32), by, dtype or by.operands)[2]


def results(operation: Any, x: Any, w: Any, ct: Any) -> tuple[Any, ...]:
    """Returns the result of an operation and both gradients."""
    y, pullback = jax.vjp(operation, x, w)
    return y, *pullback(jnp.asarray(ct, y.dtype))


@pytest.mark.cases(fast=1, slow=6)
@texts
@pytest.mark.parametrize("depth", [64, 40])
def test_all_three_products_are_of_operands_rounded_along_what_they_contract(text, depth):
    """Backward rounds the operands again, from their own numbers. Padding adds nothing."""
    by = scaled(text)
    x, w, ct = (
        RNG.standard_normal(shape).astype(F32) for shape in ((48, depth), (depth, 24), (48, 24))
    )
    run = jax.jit(functools.partial(scaled_dot_general, dimension_numbers=MATMUL, by=by))
    y, dx, dw = results(run, x, w, ct)
    g = by.gradients
    np.testing.assert_allclose(y, rounded(x, by) @ rounded(w.T, by).T, rtol=1e-5, atol=1e-5)
    expected = rounded(ct, by, g) @ rounded(w, by).T
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    expected = rounded(x.T, by) @ rounded(ct.T, by, g).T
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(slow=1)
@texts
def test_axes_of_a_batch_and_several_contracted_ones_are_laid_out_as_in_an_einsum(text):
    by = scaled(text)
    numbers = (((1, 3), (2, 0)), ((0,), (1,)))
    lhs, rhs = (RNG.standard_normal(shape).astype(F32) for shape in ((3, 8, 5, 6), (6, 3, 8, 7)))
    plain = functools.partial(jax.lax.dot_general, dimension_numbers=numbers)
    ct = RNG.standard_normal((3, 5, 7)).astype(F32)
    ours = results(
        functools.partial(scaled_dot_general, dimension_numbers=numbers, by=by), lhs, rhs, ct
    )
    bound = 0.2 if by.scaling == "nvfp4" else 0.08
    for found, true in zip(ours, results(plain, lhs, rhs, ct), strict=True):
        assert found.shape == true.shape
        assert relative(found, np.asarray(true, np.float64)) < bound
    x, kernel = jnp.ones((2, 3, 4, 5)), jnp.ones((4, 5, 6))
    found = scaled_dot_general(x, kernel, (((2, 3), (0, 1)), ((), ())), by)
    assert found.shape == (2, 3, 6)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("text", "bytes_"), [("mxfp8", 33 / 32), ("nvfp4", 9 / 16)])
def test_residuals_are_codes_and_scales(text, bytes_):
    """In bytes of an element: XLA packs two of float4 into one."""
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256, 32), jnp.bfloat16)
    run = functools.partial(scaled_dot_general, dimension_numbers=MATMUL, by=scaled(text))
    saved = jax.jit(lambda x, w: jax.vjp(run, x, w)[1])
    memory: Any = saved.lower(x, w).compile().memory_analysis()
    assert memory.output_size_in_bytes <= bytes_ * (x.size + w.size) + 256
    found = results(run, x, w.astype(jnp.float32), jnp.ones((64, 32)))
    assert [a.dtype for a in found] == [jnp.float32, jnp.bfloat16, jnp.float32]


@pytest.mark.cases(fast=1, slow=4)
@texts
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_not_finite_stays_not_finite(text, bad):
    by = scaled(text)
    x = jnp.asarray(RNG.standard_normal((4, 64)), F32).at[2, 3].set(bad)
    y = np.isnan(scaled_dot_general(x, jnp.ones((64, 3)), MATMUL, by))
    assert y[2].all() and (by.scaling == "nvfp4" or not np.delete(y, 2, 0).any())


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("text", ["mxfp8", "nvfp4"])
def test_exported_programs_multiply_codes_three_times(platform, text):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (scaled_dot_general(x, w, MATMUL, scaled(text)).astype(x.dtype) ** 2).sum()

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 16)))
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(*shapes)
    lines = exported.mlir_module().splitlines()
    dots = [line for line in lines if 'stablehlo.composite "xla.scaled_dot"' in line]
    element = {"mxfp8": "xf8E4M3FN>", "nvfp4": "xf4E2M1FN>"}[text]
    assert len(dots) == 3
    assert all(line.split(" : (")[1].count(element) == 2 for line in dots)
