"""Statistics of half-precision arrays beside float64's: exact sums in one pass, whatever the mean
is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.functions.normalization import Region, moments, shift_of

RNG = np.random.default_rng(0)
HALVES = [jnp.bfloat16, jnp.float16]


def found(x: jax.Array, region: Region) -> tuple[np.ndarray, np.ndarray]:
    parts = jax.jit(moments, static_argnums=0)(region, x)
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.float32)}
    centre, offset, variance = (np.asarray(part, np.float64) for part in parts)
    return centre + offset, variance


def truth(x: jax.Array, region: Region) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(x).astype(np.float64)
    axes = region.axes
    if region.groups:
        values = values.reshape(*x.shape[:-1], region.groups, x.shape[-1] // region.groups)
        axes = (*axes, x.ndim)
    mean, variance = values.mean(axes, keepdims=True), values.var(axes, keepdims=True)
    if region.groups:
        width = x.shape[-1] // region.groups
        mean, variance = (np.repeat(y[..., 0], width, axis=-1) for y in (mean, variance))
    return mean, variance


def check(x: jax.Array, region: Region) -> None:
    (mean, variance), (true_mean, true_variance) = found(x, region), truth(x, region)
    assert mean.shape == true_mean.shape
    spread = np.sqrt(true_variance)
    np.testing.assert_allclose(mean, true_mean, rtol=2e-7, atol=2e-7 * float(spread.max()))
    np.testing.assert_allclose(variance, true_variance, rtol=1e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("mean", "spread"), [(0, 1), (1000, 1), (-1024, 2), (3e4, 20), (1e-3, 1e-4), (7, 1e-6)]
)
@pytest.mark.parametrize("size", [1, 2, 100, 1000, 4096])
def test_moments_are_those_of_float64(dtype, mean, spread, size):
    check(jnp.asarray(mean + spread * RNG.normal(size=(3, size)), dtype), Region((1,)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((2, 5, 7, 6), Region((0, 1, 2))),
        ((2, 5, 7, 6), Region((1, 2))),
        ((2, 5, 7, 6), Region((1, 3))),
        ((2, 5, 7, 6), Region((1, 2), 3)),
        ((4, 6), Region((), 2)),
        ((4, 6), Region(())),
        ((70, 40, 30, 2), Region((0, 1, 2))),  # more than one exact sum holds
        ((131072, 2), Region((0,))),  # an axis that is cut in two
        ((2, 131074), Region((1,))),  # 2 * 65537: no divisor cuts it
        ((3, 128, 128, 4), Region((1, 2), 2)),
    ],
)
def test_moments_over_any_axes_and_groups(dtype, shape, region):
    offsets = 300 + RNG.normal(
        size=[1 if axis in region.axes else size for axis, size in enumerate(shape)]
    )
    check(jnp.asarray(offsets + RNG.normal(size=shape), dtype), region)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.0, 1.0, 1000.0, -3.140625])
@pytest.mark.parametrize("size", [3, 1000, 70000])
def test_constant_numbers_have_no_variance_and_their_own_mean(dtype, value, size):
    x = jnp.full((2, size), value, dtype)
    mean, variance = found(x, Region((1,)))
    np.testing.assert_array_equal(variance, 0)
    np.testing.assert_allclose(mean, np.asarray(x[:, :1], np.float64), rtol=2e-7)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("inlier", "outlier"), [(300, 1000), (1000, 1008), (300, -60000), (0, 1e-6), (1000, 0.001)]
)
def test_one_number_that_lies_apart(dtype, inlier, outlier):
    check(jnp.full((2, 1000), inlier, dtype).at[:, 17].set(outlier), Region((1,)))


def test_numbers_that_a_cast_did_not_round_are_rounded():
    """XLA drops the cast to half between two to float32: the sums are exact all the same."""
    x = jnp.asarray(1000 + RNG.normal(size=(4, 512)), jnp.float32)
    rounded = x.astype(jnp.bfloat16)
    centre, offset, variance = jax.jit(
        lambda x: moments(Region((1,)), (x * 1).astype(jnp.bfloat16))
    )(x)
    for ours, true in zip((centre + offset, variance), truth(rounded, Region((1,))), strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-6)


def test_numbers_that_are_not_finite_leave_no_finite_variance():
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.ones((2, 8), jnp.bfloat16).at[0, 3].set(bad)
        _, variance = found(x, Region((1,)))
        assert np.isnan(variance[0, 0]) and variance[1, 0] == 0


def test_parts_are_joined_in_one_pass():
    """No sum waits for another, so that devices exchange all of them at once."""
    x = jax.ShapeDtypeStruct((8, 64, 64, 4), jnp.float16)
    jaxpr = jax.make_jaxpr(functools.partial(moments, Region((0, 1, 2))))(x).jaxpr
    depth: dict[int, int] = {}
    for equation in jaxpr.eqns:
        before = max((depth.get(id(v), 0) for v in equation.invars), default=0)
        for variable in equation.outvars:
            depth[id(variable)] = before + (equation.primitive.name == "reduce_sum")
    assert max(depth.values()) == 2  # within the parts, then among them


# --- shift ----------------------------------------------------------------------------------------


def shift(x: jax.Array, *axes: int) -> jax.Array:
    shifted = shift_of(Region(tuple(sorted(axis % x.ndim for axis in axes))), x)
    assert shifted is not None
    return shifted


def test_a_shift_is_the_mean_of_four_elements_and_lets_no_gradient_through_it():
    x = jnp.asarray(1000 + RNG.normal(size=(4, 8)), jnp.float32)
    np.testing.assert_allclose(shift(x, -1), x[:, ::2].mean(1, keepdims=True), rtol=1e-6)
    diagonal = np.mean([x[0, 0], x[1, 2], x[2, 4], x[3, 6]])
    np.testing.assert_allclose(shift(x, 0, 1), [[diagonal]], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: (x - shift(x, -1)).sum())(x), np.ones((4, 8)))
    assert bool(jnp.isfinite(shift(jnp.full((2, 8), 3e38), -1)).all())
    assert shift_of(Region((1,)), jnp.ones((4, 0))) is None


# --------------------------------------------------------------------------------------------------
# Two sums along columns, which is what GPUs take in one pass
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((2, 5, 7, 6), Region((0, 1, 2))),
        ((2, 5, 7, 6), Region((0, 2))),
        ((2, 5, 7, 6), Region((1, 2), 3)),
        ((64, 28, 28, 3), Region((0, 1, 2))),
        ((70000, 2), Region((0,))),
    ],
)
@pytest.mark.parametrize(
    ("mean", "spread"), [(0, 1), (300, 1), (-1024, 2), (1e-3, 1e-4), (7, 1e-6)]
)
def test_moments_from_whole_squares_are_those_of_float64(monkeypatch, shape, region, mean, spread):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, cuda, **_: cuda(x))
    x = jnp.asarray(mean + spread * RNG.normal(size=shape), jnp.bfloat16)
    centre, offset, variance = (np.asarray(part, np.float64) for part in moments(region, x))
    true_mean, true_variance = truth(x, region)
    np.testing.assert_allclose(
        centre + offset, true_mean, rtol=2e-7, atol=2e-7 * float(np.sqrt(true_variance).max())
    )
    np.testing.assert_allclose(variance, true_variance, rtol=5e-4)


@pytest.mark.parametrize(
    ("dtype", "region", "sums"),
    [
        (jnp.bfloat16, Region((0, 1)), {"tpu": 3, "cpu": 3, "cuda": 2}),
        (
            jnp.bfloat16,
            Region((2,)),
            {"tpu": 3, "cpu": 3, "cuda": 3},
        ),  # of rows GPUs take three at once
        (
            jnp.float16,
            Region((0, 1)),
            {"tpu": 3, "cpu": 3, "cuda": 3},
        ),  # of 4 squares no more adds up exactly
    ],
)
def test_sums_of_each_platform(dtype, region, sums):
    lowered = jax.jit(functools.partial(moments, region)).trace(
        jax.ShapeDtypeStruct((4, 16, 128), dtype)
    )
    for platform, count in sums.items():
        assert (
            lowered.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.reduce(")
            == count
        )
