"""`normalize` beside float64: values, first and second derivatives, those of the statistics, and
frozen arguments; and the statistics of half-precision arrays: exact sums in one pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpmodules.functions.normalization import Region, moments, normalize, shift_of
from policy.testing import assert_close_in_ulps

RNG = np.random.default_rng(0)
HALVES = ["bfloat16", "float16"]


jitted = jax.jit(moments, static_argnums=0)


def found(x: jax.Array, region: Region, run: Any = jitted) -> tuple[np.ndarray, np.ndarray]:
    parts = run(region, x)
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.float32)}
    centre, offset, variance = (np.asarray(part, np.float64) for part in parts)
    return centre + offset, variance


def truth(x: Any, region: Region) -> tuple[np.ndarray, np.ndarray]:
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


def check(x: jax.Array, region: Region, rtol: float = 1e-4, run: Any = jitted) -> None:
    (mean, variance), (true_mean, true_variance) = found(x, region, run), truth(x, region)
    assert mean.shape == true_mean.shape
    spread = np.sqrt(true_variance)
    np.testing.assert_allclose(mean, true_mean, rtol=2e-7, atol=2e-7 * float(spread.max()))
    np.testing.assert_allclose(variance, true_variance, rtol=rtol)


@pytest.mark.cases(fast=3, slow=12)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("mean", "spread"), [(0, 1), (1000, 1), (-1024, 2), (3e4, 20), (1e-3, 1e-4), (7, 1e-6)]
)
@pytest.mark.parametrize("size", [1, 2, 100, 1000, 4096])
def test_moments_are_those_of_float64(dtype, mean, spread, size):
    check(jnp.asarray(mean + spread * RNG.normal(size=(3, size)), dtype), Region((1,)))


@pytest.mark.cases(fast=1, slow=11)
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
    kept = [1 if axis in region.axes else size for axis, size in enumerate(shape)]
    offsets = 300 + RNG.normal(size=kept)
    check(jnp.asarray(offsets + RNG.normal(size=shape), dtype), region)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.0, 1.0, 1000.0, -3.140625])
@pytest.mark.parametrize("size", [3, 1000, 70000])
def test_constant_numbers_have_no_variance_and_their_own_mean(dtype, value, size):
    x = jnp.full((2, size), value, dtype)
    mean, variance = found(x, Region((1,)))
    np.testing.assert_array_equal(variance, 0)
    np.testing.assert_allclose(mean, np.asarray(x[:, :1], np.float64), rtol=2e-7)


@pytest.mark.cases(fast=2)
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
    run = jax.jit(lambda x: moments(Region((1,)), (x * 1).astype(jnp.bfloat16)))
    centre, offset, variance = run(x)
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


@pytest.mark.cases(fast=1, slow=9)
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
    check(x, region, rtol=5e-4, run=moments)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("dtype", "region", "of_cuda"),
    [
        ("bfloat16", Region((0, 1)), 2),
        ("bfloat16", Region((2,)), 3),  # of rows GPUs take three at once
        ("float16", Region((0, 1)), 3),  # of 4 squares no more adds up exactly
    ],
)
def test_sums_of_each_platform(dtype, region, of_cuda):
    x = jax.ShapeDtypeStruct((4, 16, 128), dtype)
    traced = jax.jit(functools.partial(moments, region)).trace(x)
    for platform, count in (("tpu", 3), ("cpu", 3), ("cuda", of_cuda)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.reduce(") == count


EPSILON = 1e-3
SHAPE = (2, 3, 4)
CHANNELS = (1, 1, 4)
# What shares a mean, and the shape of scale and bias.
REGIONS = {
    "rows": (Region((2,)), CHANNELS),
    "two axes, and the features too": (Region((1, 2)), (1, 3, 4)),
    "the features are another axis": (Region((2,)), (1, 3, 1)),
    "the batch": (Region((0, 1)), CHANNELS),
    "each image's channels": (Region((1,)), CHANNELS),
    "groups": (Region((1,), 2), CHANNELS),
    "everything": (Region((0, 1, 2)), CHANNELS),
}
Arguments = Any  # x, scale, bias


def arguments(half: str, shape: Any, *, scale: bool = True, bias: bool = True) -> Arguments:
    x = jnp.asarray(2 + RNG.normal(size=SHAPE), half)
    given = [jnp.asarray(RNG.normal(size=shape), jnp.float32) for _ in range(2)]
    return x, given[0] if scale else None, given[1] if bias else None


def wide(arguments: Arguments) -> Any:
    return tuple(None if value is None else np.asarray(value, np.float64) for value in arguments)


def ours(region: Region, dtype: str = "float32") -> Callable[..., Any]:
    return lambda *arguments: normalize(*arguments, region=region, epsilon=EPSILON, dtype=dtype)


def exact(region: Region, x: Any, scale: Any, bias: Any) -> tuple[np.ndarray, ...]:
    mean, variance = truth(x, region)
    y = (x - mean) / np.sqrt(variance + EPSILON)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias, mean, variance


def directional(function: Any, at: Arguments, towards: Any, step: float = 1e-5) -> Any:
    """The derivative of a function of float64 along `towards`, whose entries may be None."""

    def moved(by: float) -> Any:
        pairs = zip(at, towards, strict=True)
        return function(*(x if x is None or t is None else x + by * t for x, t in pairs))

    return jax.tree.map(lambda high, low: (high - low) / (2 * step), moved(step), moved(-step))


def gradient(loss: Any, at: Arguments, argument: int, step: float = 1e-5) -> np.ndarray:
    found = np.zeros(at[argument].shape)
    for index in np.ndindex(found.shape):
        unit = np.zeros(found.shape)
        unit[index] = 1
        towards = [unit if i == argument else None for i in range(3)]
        found[index] = directional(loss, at, towards, step)
    return found


def weighted(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return sum((w * y).sum() for w, y in zip(weights, function(*arguments), strict=True))

    return run


def statistics_weights(region: Region) -> Any:
    """Of the result, and of both statistics."""
    shapes = [y.shape for y in exact(region, np.zeros(SHAPE), None, None)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


# Each region with both, and the groups with one or none.
CASES = [(name, True, True) for name in REGIONS] + [
    ("groups", s, b) for s, b in ((1, 0), (0, 1), (0, 0))
]


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(("name", "scale", "bias"), [*CASES, ("rows", 0, 0), ("the batch", 0, 0)])
def test_values_and_both_modes_of_derivative_are_those_of_float64(name, scale, bias):
    region, shape = REGIONS[name]
    half = "bfloat16"
    at = arguments(half, shape, scale=scale, bias=bias)
    tangents = jax.tree.map(lambda v: jnp.asarray(RNG.normal(size=v.shape), v.dtype), at)
    weights = statistics_weights(region)

    @jax.jit
    def run(at: Arguments, tangents: Any) -> Any:
        y, pull = jax.vjp(ours(region), *at)
        return y, pull(tuple(weights)), jax.jvp(ours(region), at, tangents)[1]

    values, cotangents, moved = run(at, tangents)
    truth = lambda *arguments: exact(region, *arguments)  # noqa: E731
    for found, true in zip(values, truth(*wide(at)), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=2e-6)
    for found, true in zip(moved, directional(truth, wide(at), wide(tangents)), strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-4, atol=2e-5)
    loss = weighted(truth, [np.asarray(w, np.float64) for w in weights])
    for argument, found in enumerate(cotangents):
        if at[argument] is None:
            assert found is None
            continue
        true = gradient(loss, wide(at), argument)
        assert found.dtype == at[argument].dtype
        if argument:
            np.testing.assert_allclose(found, true, rtol=1e-4, atol=2e-5)
        else:
            assert_close_in_ulps(found, true, 0.51, half, floor=2.0**-6)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", REGIONS)
def test_second_derivatives_are_those_of_float64(name, half):
    """Of a function of everything that is returned, in both orders of reverse and forward mode."""
    region, shape = REGIONS[name]
    at = arguments(half, shape)
    weights = statistics_weights(region)
    direction = jnp.asarray(RNG.normal(size=SHAPE), half)

    def along(x: Any, function: Any) -> Any:
        return jax.jvp(function, (x,), (direction,))[1]

    def loss(x: Any) -> Any:
        return weighted(lambda *a: [y * y for y in ours(region)(*a)], weights)(x, *at[1:])

    @jax.jit
    def products(x: Any) -> Any:
        return (
            along(x, jax.grad(loss)),
            jax.grad(lambda x: along(x, loss))(x),
            jax.grad(lambda x: dot(jax.grad(loss)(x)))(x),
        )

    def dot(slope: Any) -> Any:
        return jnp.sum((slope * direction).astype(jnp.float32))

    def exact_loss(*arguments: Any) -> Any:
        squares = lambda *a: [y * y for y in exact(region, *a)]  # noqa: E731
        return weighted(squares, [np.asarray(w, np.float64) for w in weights])(*arguments)

    slope = lambda *a: gradient(exact_loss, a, 0, 1e-4)  # noqa: E731
    true = directional(slope, wide(at), wide((direction, None, None)), 1e-4)
    # a few casts of the cotangent to half
    bound = 4 * float(jnp.finfo(half).eps) * np.abs(true).max()
    for found in products(at[0]):
        assert found.dtype == half
        assert np.abs(np.asarray(found, np.float64) - true).max() <= bound


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 2)])
def test_frozen_arguments_leave_the_gradients_of_others_as_they_are(frozen):
    region, shape = REGIONS["groups"]
    at = arguments("bfloat16", shape)
    free = tuple(i for i in range(3) if i not in frozen)
    loss = weighted(ours(region), statistics_weights(region))
    all_gradients = jax.grad(loss, argnums=(0, 1, 2))(*at)
    for found, i in zip(jax.grad(loss, argnums=free)(*at), free, strict=True):
        rtol = 1e-2 if i == 0 else 1e-4
        np.testing.assert_allclose(*wide((found, all_gradients[i])), rtol=rtol, atol=1e-6)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["rows", "the batch", "groups"])
def test_a_result_in_half_is_rounded_once(name, half):
    region, shape = REGIONS[name]
    at = arguments(half, shape)
    y, *_ = ours(region, half)(*at)
    assert y.dtype == half
    assert_close_in_ulps(y, exact(region, *wide(at))[0], 0.51, half, floor=2.0**-6)


@pytest.mark.slow
def test_batches_of_inputs_and_scales_are_those_of_one_at_a_time():
    region, shape = REGIONS["groups"]
    examples = [arguments("bfloat16", shape) for _ in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples)
    loss = weighted(ours(region), statistics_weights(region))
    found = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for i, example in enumerate(examples):
        for ours_, alone in zip(found, jax.grad(loss, argnums=(0, 1, 2))(*example), strict=True):
            np.testing.assert_allclose(wide((ours_[i],)), wide((alone,)), rtol=1e-2, atol=1e-5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("epsilon", [0, 1e-3])
def test_constant_rows_have_the_bias_and_pass_no_gradient(epsilon):
    x = jnp.full((2, 4), 1000.0, jnp.bfloat16)
    options: dict[str, Any] = {"region": Region((1,)), "epsilon": epsilon, "dtype": "float32"}
    y, pull = jax.vjp(lambda x: normalize(x, None, None, **options)[0], x)
    if epsilon:
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], 0)
    else:  # 0 / 0, as by Flax
        assert np.isnan(y).all()


@pytest.mark.slow
def test_along_explicit_axes_gradients_are_sharded_as_what_they_are_of():
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def sharded(shape: tuple[int, ...], dtype: str, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    scale = sharded((1, 8), "float32", None, "model")  # where x is whole along its channels
    loss = lambda *a: jnp.sum(ours(Region((1,)))(*a)[0])  # noqa: E731
    with jax.sharding.use_abstract_mesh(mesh):
        x = sharded((4, 8), "bfloat16", "data", None)
        found: Any = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), x, scale, scale)
    specs = [tuple(leaf.sharding.spec) for leaf in found]
    assert specs == [("data", None), (None, "model"), (None, "model")]
