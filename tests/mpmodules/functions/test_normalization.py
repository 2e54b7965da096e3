"""`normalize` beside float64: values, first and second derivatives, those of the statistics, and
frozen arguments.

Truth is the formula in numpy, differentiated by central differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpmodules.functions.normalization import Region, normalize
from policy.testing import assert_close_in_ulps

RNG = np.random.default_rng(0)
EPSILON = 1e-3
SHAPE = (2, 3, 4)
HALVES = ["bfloat16", "float16"]
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


def arguments(
    half: str, shape: tuple[int, ...], *, scale: bool = True, bias: bool = True
) -> Arguments:
    x = jnp.asarray(2 + RNG.normal(size=SHAPE), half)
    given = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for _ in range(2))
    return x, *(
        value if is_given else None for value, is_given in zip(given, (scale, bias), strict=True)
    )


def wide(arguments: Arguments) -> Any:
    return tuple(None if value is None else np.asarray(value, np.float64) for value in arguments)


def ours(region: Region, dtype: str = "float32") -> Callable[..., Any]:
    return lambda *arguments: normalize(*arguments, region=region, epsilon=EPSILON, dtype=dtype)


def exact(region: Region, x: Any, scale: Any, bias: Any) -> tuple[np.ndarray, ...]:
    axes = region.axes
    grouped = x
    if region.groups:
        grouped, axes = x.reshape(*x.shape[:-1], region.groups, -1), (*axes, x.ndim)
    mean, variance = (np.asarray(f(grouped, axis=axes, keepdims=True)) for f in (np.mean, np.var))
    if region.groups:
        width = x.shape[-1] // region.groups
        mean, variance = (np.repeat(y[..., 0], width, axis=-1) for y in (mean, variance))
    y = (x - mean) / np.sqrt(variance + EPSILON)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias, mean, variance


def directional(
    function: Callable[..., Any], at: Arguments, towards: Any, step: float = 1e-5
) -> Any:
    """The derivative of a function of float64 along `towards`, whose entries may be None."""

    def moved(by: float) -> Any:
        pairs = zip(at, towards, strict=True)
        return function(
            *(value if value is None or t is None else value + by * t for value, t in pairs)
        )

    return jax.tree.map(lambda high, low: (high - low) / (2 * step), moved(step), moved(-step))


def gradient(
    loss: Callable[..., Any], at: Arguments, argument: int, step: float = 1e-5
) -> np.ndarray:
    found = np.zeros(at[argument].shape)
    for index in np.ndindex(found.shape):
        unit = np.zeros(found.shape)
        unit[index] = 1
        found[index] = directional(
            loss, at, [unit if i == argument else None for i in range(3)], step
        )
    return found


def weighted(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    return lambda *arguments: sum(
        (w * y).sum() for w, y in zip(weights, function(*arguments), strict=True)
    )


def statistics_weights(region: Region) -> Any:
    """Of the result, and of both statistics."""
    shapes = [y.shape for y in exact(region, np.zeros(SHAPE), None, None)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


# Each region with both, and the groups with one or none.
CASES = [(name, True, True) for name in REGIONS] + [
    ("groups", s, b) for s, b in ((1, 0), (0, 1), (0, 0))
]


@pytest.mark.parametrize(("name", "scale", "bias"), [*CASES, ("rows", 0, 0), ("the batch", 0, 0)])
def test_values_and_both_modes_of_derivative_are_those_of_float64(name, scale, bias):
    region, shape = REGIONS[name]
    half = "bfloat16"
    at = arguments(half, shape, scale=scale, bias=bias)
    tangents = tuple(
        None if v is None else jnp.asarray(RNG.normal(size=v.shape), v.dtype) for v in at
    )
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

    true = directional(
        lambda *a: gradient(exact_loss, a, 0, 1e-4),
        wide(at),
        (*wide((direction, None, None)),),
        1e-4,
    )
    scale = np.abs(true).max()
    for found in products(at[0]):
        assert found.dtype == half
        error = np.abs(np.asarray(found, np.float64) - true).max()
        assert (
            error <= 4 * float(jnp.finfo(half).eps) * scale
        )  # a few casts of the cotangent to half


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 2)])
def test_frozen_arguments_leave_the_gradients_of_others_as_they_are(frozen):
    region, shape = REGIONS["groups"]
    at = arguments("bfloat16", shape)
    free = tuple(i for i in range(3) if i not in frozen)
    loss = weighted(ours(region), statistics_weights(region))
    all_gradients = jax.grad(loss, argnums=(0, 1, 2))(*at)
    for found, i in zip(jax.grad(loss, argnums=free)(*at), free, strict=True):
        np.testing.assert_allclose(
            wide((found,)), wide((all_gradients[i],)), rtol=1e-2 if i == 0 else 1e-4, atol=1e-6
        )


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["rows", "the batch", "groups"])
def test_a_result_in_half_is_rounded_once(name, half):
    region, shape = REGIONS[name]
    at = arguments(half, shape)
    y, *_ = ours(region, half)(*at)
    assert y.dtype == half
    assert_close_in_ulps(y, exact(region, *wide(at))[0], 0.51, half, floor=2.0**-6)


def test_batches_of_inputs_and_scales_are_those_of_one_at_a_time():
    region, shape = REGIONS["groups"]
    examples = [arguments("bfloat16", shape) for _ in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *examples)
    loss = weighted(ours(region), statistics_weights(region))
    found = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for i, example in enumerate(examples):
        for ours_, alone in zip(found, jax.grad(loss, argnums=(0, 1, 2))(*example), strict=True):
            np.testing.assert_allclose(wide((ours_[i],)), wide((alone,)), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0, 1e-3])
def test_constant_rows_have_the_bias_and_pass_no_gradient(epsilon):
    x = jnp.full((2, 4), 1000.0, jnp.bfloat16)
    y, pull = jax.vjp(
        lambda x: normalize(x, None, None, region=Region((1,)), epsilon=epsilon, dtype="float32")[
            0
        ],
        x,
    )
    if epsilon:
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], 0)
    else:  # 0 / 0, as by Flax
        assert np.isnan(y).all()


def test_along_explicit_axes_gradients_are_sharded_as_what_they_are_of():
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def sharded(shape: tuple[int, ...], dtype: str, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    scale = sharded((1, 8), "float32", None, "model")  # where x is whole along its channels
    with jax.sharding.use_abstract_mesh(mesh):
        found: Any = jax.eval_shape(
            jax.grad(lambda *a: jnp.sum(ours(Region((1,)))(*a)[0]), argnums=(0, 1, 2)),
            sharded((4, 8), "bfloat16", "data", None),
            scale,
            scale,
        )
    assert [tuple(leaf.sharding.spec) for leaf in found] == [
        ("data", None),
        (None, "model"),
        (None, "model"),
    ]
