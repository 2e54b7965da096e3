"""Codes and scales beside NumPy in float64, and beside what others publish."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.core.einsums import dot_of_einsum
from policy.core.param_formats import CODES, NF4, ParamFormat, format_of
from policy.quantized import QuantizedArray, products
from policy.quantized.codes import numbers

# github.com/bitsandbytes-foundation/bitsandbytes, csrc/kernels.cu, dQuantizeNF4: the code i + 1 is
# taken above the i-th.
NF4_THRESHOLDS = (
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
    *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767),
    *(0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683),
    *(0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)
FORMATS = ("int8", "int8:32", "float8", "float8:16", "int4:32", "uint4:32", "nf4", "nf4:16")


def held_format(text: str) -> ParamFormat:
    held = format_of(text)
    assert held is not None
    return held


def wide_numbers(shape=(64, 24), seed=0):
    """Numbers whose columns and blocks differ in size, with a large negative one in each column."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1])) * 0.1
    x[5] = -4 * np.abs(x).max(0)
    return x.astype(np.float32)


def in_blocks(x, block):
    """(n, m) as (n / block, block, m)."""
    return x.reshape(-1, block or len(x), x.shape[-1]).astype(np.float64)


def nearest(unit, name):
    """The codes of the nearest numbers, in float64, and whether each is clearly the nearest."""
    if name == "nf4":
        levels = np.array(NF4)
    elif name == "float8":
        levels = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
        levels = np.unique(levels[np.isfinite(levels)])
    else:
        lowest, highest = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15)}[name]
        levels = np.arange(lowest, highest + 1)
    away = np.abs(unit[..., None] - levels)
    first, second = np.sort(away, -1)[..., :2].transpose(-1, *range(unit.ndim))
    best = away.argmin(-1)
    return (best if name == "nf4" else levels[best]), second - first > 1e-5 * np.abs(levels).max()


def test_the_table_of_nf4_is_the_papers():
    # QLoRA, arXiv:2305.14314, section 3: quantiles of a normal distribution, 8 of the negative and
    # 9 of the positive half, one zero of two removed; the outermost at 1 - (1/32 + 1/30) / 2.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantile = statistics.NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.5, outermost, 9)]
    below = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)]
    levels = np.array([*below, *above[1:]]) / above[-1]
    np.testing.assert_allclose(NF4, levels, rtol=0, atol=2e-6)
    thresholds = (np.array(NF4[1:]) + NF4[:-1]) / 2
    np.testing.assert_allclose(thresholds, NF4_THRESHOLDS, rtol=0, atol=1e-7)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("run", [jax.jit, lambda function: function])
def test_nf4_has_the_papers_numbers_bit_for_bit_each_rounded_to_bfloat16(run, dtype):
    found = run(lambda codes: numbers(codes, "nf4", dtype))(jnp.arange(16, dtype=jnp.uint4))
    rounded = jnp.asarray(NF4, jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)
    found, rounded = (np.asarray(x, np.float32).view(np.uint32) for x in (found, rounded))
    np.testing.assert_array_equal(found, rounded)


def test_numbers_around_the_published_thresholds_get_the_published_codes():
    thresholds = np.array(NF4_THRESHOLDS)
    units = np.sort(np.concatenate([thresholds - 1e-6, thresholds + 1e-6, [-1, 1]]))
    stored = QuantizedArray.of(jnp.asarray(units[:, None], jnp.float32), "nf4:32", axis=0)
    published = (units[:, None] > thresholds).sum(-1)
    np.testing.assert_array_equal(np.asarray(stored.codes, int).ravel(), published)


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_codes_are_the_nearest_for_the_rounded_scale(text, scale_dtype):
    held = held_format(text)
    kind, x = CODES[held.name], wide_numbers()
    stored = QuantizedArray.of(jnp.asarray(x), text, scale_dtype=scale_dtype)
    blocks = in_blocks(x, held.block)
    eps = float(jnp.finfo(scale_dtype).eps)
    if kind.has_minimum:
        minimum = blocks.min(1, keepdims=True).astype(scale_dtype).astype(np.float64)
        scale = (blocks - minimum).max(1, keepdims=True) / kind.largest
        own, kept = np.split(np.asarray(stored.scales[0], np.float64), 2, 1)
        np.testing.assert_array_equal(kept, minimum)
    else:
        # int4: llama.cpp's quantize_row_q4_0_ref takes the largest magnitude to -8
        worst = np.abs(blocks).argmax(1, keepdims=True)
        extreme = np.take_along_axis(blocks, worst, 1)
        extreme = extreme if kind.largest < 0 else np.abs(extreme)
        minimum, scale = np.zeros(1), extreme / kind.largest
        own = np.asarray(stored.scales, np.float64).reshape(scale.shape)
    assert stored.scales.dtype == scale_dtype
    np.testing.assert_allclose(own, scale, rtol=2 * eps)
    unit = (blocks - minimum) / own
    codes, is_clear = nearest(unit, held.name)
    assert is_clear.mean() > 0.99
    found = np.asarray(stored.codes).view(kind.dtype).astype(np.float64).reshape(blocks.shape)
    np.testing.assert_array_equal(found[is_clear], codes[is_clear])
    # the largest of a block is off by the rounding of its scale, others by half a step
    steps = np.abs((in_blocks(np.asarray(stored), held.block) - blocks) / own)
    # int4 has no 8
    half = {"int8": 0.5, "int4": 1, "uint4": 0.5, "float8": 16, "nf4": 0.152}[held.name]
    assert steps.max() <= half + abs(kind.largest) * eps


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["int8:2", "float8:2", "int4:2", "uint4:2", "nf4:2"])
def test_every_code_with_every_kind_of_scale_is_read_as_it_is(text):
    name = held_format(text).name
    dtype = CODES[name].dtype
    codes = np.arange(256, dtype=np.uint8)
    if dtype in (jnp.int8, jnp.float8_e4m3fn):
        codes = codes.view(dtype)
    else:
        codes = (codes % 16).astype(int) - (8 if dtype == jnp.int4 else 0)
    codes = codes[np.isfinite(codes.astype(np.float32))].astype(np.float32)
    codes = codes[: len(codes) // 2 * 2, None]
    rng = np.random.default_rng(1)
    scales = np.exp2(rng.integers(-14, 6, (len(codes) // 2, 1))) * rng.uniform(
        1, 2, (len(codes) // 2, 1)
    )
    signs = rng.choice([-1, 1], scales.shape)  # a scale of GGUF's may be negative
    scales = (scales * signs).astype(np.float16)
    minimums = scales[::-1].copy() if CODES[name].has_minimum else None
    stored = QuantizedArray.of_codes(codes, scales, text, axis=0, minimums=minimums)
    numbers = np.array(NF4)[codes.astype(int)] if name == "nf4" else np.asarray(codes, np.float64)
    exact = numbers * np.asarray(scales, np.float64).repeat(2, 0)
    exact += 0 if minimums is None else np.asarray(minimums, np.float64).repeat(2, 0)
    wide = np.asarray(stored)
    assert wide.dtype == np.float32 and stored.codes.dtype == CODES[name].stored
    if name == "nf4":
        np.testing.assert_array_max_ulp(wide, exact.astype(np.float32), 1)
    else:
        np.testing.assert_array_equal(wide, exact.astype(np.float32))
    half = np.asarray(stored.astype(jnp.bfloat16))
    if name == "nf4":  # its table is rounded too
        np.testing.assert_allclose(half.astype(np.float32), wide, rtol=2**-7)
    else:
        np.testing.assert_array_equal(half, wide.astype(jnp.bfloat16))  # rounded once
    if minimums is None and name != "nf4":  # codes of the numbers that they stand for are the same
        held = np.asarray(stored.codes).view(dtype).reshape(codes.shape)
        again = QuantizedArray.of_codes(held, scales, text, axis=0)
        np.testing.assert_array_equal(again.codes, stored.codes)


@pytest.mark.cases(fast=7, slow=8)
@pytest.mark.parametrize("text", ["int8:4", "float8:4", "int4:4", "uint4:4", "nf4:4"])
@pytest.mark.parametrize(
    "block",
    [(0, 0, 0, 0), (-5, -5, -5, -5), (-7, 0, 0, 0), (1e37, -1e37, 0, 1), (1e-30, 0, -1e-30, 0)],
)
def test_blocks_of_zeros_and_extremes_stay_finite_and_keep_their_extremes(text, block):
    x = np.array(block, np.float32)[:, None]
    wide = np.asarray(QuantizedArray.of(jnp.asarray(x), text, axis=0))
    largest = np.abs(x).max()
    np.testing.assert_allclose(wide, x, rtol=0, atol=largest * (2 / 15 + 2**-7))
    worst = x.argmin() if -x.min() == largest else np.abs(x).argmax()
    np.testing.assert_allclose(wide[worst], x[worst], rtol=2**-7)
    assert "uint4" in text or (wide[x == 0] == 0).all()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int4:24"}, r"axis -2 of an array of shape \(64, 8\) is no multiple of 24"),
        ({"scales": np.ones((64, 8))}, r"scales should be \(2, 8\), one for each block of int4:32"),
        ({"minimums": np.ones((2, 8))}, "int4:32 has no minimums"),
        ({"format": "uint4:32"}, "uint4:32 needs minimums, the numbers of the code 0"),
        (
            {"format": "q4_k"},
            "Unknown format 'q4_k': it should be one of int8, float8, int4:32, uint4:32",
        ),
        ({"scales": np.full((2, 8), np.inf)}, "scales of int4:32 hold numbers that are not finite"),
    ],
)
def test_codes_that_do_not_fit_are_rejected(change, message):
    given = {"codes": np.ones((64, 8)), "scales": np.ones((2, 8)), "format": "int4:32"}
    with pytest.raises(ValueError, match=message):
        QuantizedArray.of_codes(**(given | change))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("text", ["uint4:16", "int4:16"])
def test_matmuls_and_lookups_of_blocks_read_minimums(text):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    shapes = {"by,yz->bz": (64, 48), "by,zy->bz": (48, 64), "by,yhz->bhz": (64, 16, 16)}
    for subscripts, shape in shapes.items():
        for axis in range(len(shape)):
            kernel = jnp.asarray(rng.normal(1, 1, shape), jnp.float32)
            stored = QuantizedArray.of(kernel, text, axis=axis)
            wide = np.asarray(stored, np.float64)
            found = dot_of_einsum(subscripts, x.ndim, len(shape))
            assert found is not None and found[1] == [*range(len(shape))]
            y, pull = jax.vjp(lambda x, w=stored, n=found[0]: products.dot_general(x, w, n), x)
            exact = np.einsum(subscripts, np.asarray(x, np.float64), wide)
            np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
            given = subscripts.split(",")[0], *subscripts.split(",")[1].split("->")
            (back,) = pull(jnp.asarray(exact, jnp.float32))
            exact = np.einsum(f"{given[2]},{given[1]}->{given[0]}", exact, wide)
            np.testing.assert_allclose(back, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
            tokens = jnp.array([[3, shape[0] - 1], [0, -1]])
            np.testing.assert_array_equal(products.rows(stored, tokens), stored[tokens])
