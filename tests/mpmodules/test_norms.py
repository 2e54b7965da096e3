"""Normalisations of half-precision data far from zero, against float64, and their running
statistics.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from mpmodules.functions.moments import Region
from mpmodules.functions.normalization import normalize
from policy import use_policy
from policy.programs.walk import walk
from policy.testing import assert_close_in_ulps

HALVES = ["bfloat16", "float16"]
RNG = np.random.default_rng(0)
SHAPE = (4, 5, 5, 8)
MEANS = np.linspace(-1500.0, 1500.0, 8)  # another for each channel


def images(half: str, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(MEANS * 0.6 + scale * RNG.normal(size=SHAPE) * (1 + np.arange(8)), half)


def exact(x: Any, axes: tuple[int, ...], epsilon: float, groups: int | None = None) -> np.ndarray:
    x = np.asarray(x, np.float64)
    shape = x.shape
    x = x if groups is None else x.reshape(*shape[:-1], groups, shape[-1] // groups)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return ((x - mean) / np.sqrt(var + epsilon)).reshape(shape)


def assert_close(found: Any, truth: np.ndarray, half: str, ulps: int) -> None:
    """In units in the last place of values from 2^-5 on; smaller ones count as that large."""
    assert found.dtype == half
    assert_close_in_ulps(found, truth, ulps, floor=2.0**-5)


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "BatchNorm": ({}, lambda x: exact(x, (0, 1, 2), 1e-5)),
    "GroupNorm": ({"num_groups": 2}, lambda x: exact(x, (1, 2, 4), 1e-6, groups=2)),
    "InstanceNorm": ({}, lambda x: exact(x, (1, 2), 1e-6)),
    "LayerNorm": ({}, lambda x: exact(x, (3,), 1e-6)),
}


def normalise(
    wing: str, name: str, x: jax.Array, half: str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The result, and the running statistics."""
    with use_policy(f"p=f32,c={half},o={half}"):
        if wing == "linen":
            options |= {"use_running_average": False} if name == "BatchNorm" else {}
            layer: Any = getattr(linen, name)(**options)
            variables: Any = layer.init(jax.random.key(0), x)
            y, updated = jax.jit(lambda v, x: layer.apply(v, x, mutable=["batch_stats"]))(
                variables, x
            )
            return y, updated.get("batch_stats", {})
        layer = getattr(nnx, name)(x.shape[-1], **options, rngs=nnx.Rngs(0))
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
        return y, {"mean": layer.mean[...], "var": layer.var[...]} if name == "BatchNorm" else {}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_offset_channels_are_within_one_ulp(wing, name, half):
    options, truth = CASES[name]
    x = images(half)
    y, _ = normalise(wing, name, x, half, **options)
    assert_close(y, truth(x), half, 1)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_running_statistics_are_those_of_the_input_as_it_came(wing, half):
    x = images(half)
    _, stats = normalise(wing, "BatchNorm", x, half, momentum=0.75)
    wide = np.asarray(x, np.float64)
    assert {stats["mean"].dtype, stats["var"].dtype} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(stats["mean"], 0.25 * wide.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.75 + 0.25 * wide.var((0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_axis_of_devices_normalises_over_all_of_them(wing):
    x = images("float16")

    if wing == "linen":
        layer: Any = linen.BatchNorm(
            use_running_average=False, axis_name="devices", dtype_policy="f16"
        )
        variables: Any = layer.init(jax.random.key(0), x)
        y = jax.vmap(
            lambda x: layer.apply(variables, x, mutable=["batch_stats"])[0], axis_name="devices"
        )(x[:, None])
    else:
        graphdef, state = flax_nnx.split(
            nnx.BatchNorm(8, axis_name="devices", rngs=nnx.Rngs(0), dtype_policy="f16")
        )
        y = jax.vmap(lambda x: flax_nnx.merge(graphdef, state, copy=True)(x), axis_name="devices")(
            x[:, None]
        )
    assert_close(
        y[:, 0], exact(x, (0, 1, 2), 1e-5), "float16", 8
    )  # two passes over data that is not shifted


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_gradients_by_offset_data_are_float64s(wing):
    x, weight = images("float16"), jnp.asarray(RNG.normal(size=SHAPE), "float32")

    def loss(x: jax.Array) -> jax.Array:
        if wing == "linen":
            layer: Any = linen.BatchNorm(use_running_average=False)
            y = layer.apply(variables, x, mutable=["batch_stats"])[0]
        else:
            y = flax_nnx.merge(graphdef, state, copy=True)(x)
        return jnp.sum(y.astype(jnp.float32) * weight)

    with use_policy("p=f32,c=f16,o=f16"):
        variables: Any = linen.BatchNorm(use_running_average=False).init(jax.random.key(0), x)
        graphdef, state = flax_nnx.split(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
        found = jax.grad(loss)(x)
    normal, scale = (
        exact(x, (0, 1, 2), 1e-5),
        1 / np.sqrt(np.asarray(x, np.float64).var((0, 1, 2)) + 1e-5),
    )
    ct = np.asarray(
        weight.astype(jnp.float16), np.float64
    )  # as it arrives at a layer that returns half
    truth = scale * (ct - ct.mean((0, 1, 2)) - normal * (ct * normal).mean((0, 1, 2)))
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(
        np.asarray(found, np.float64), truth, rtol=2e-3, atol=1e-3 * np.abs(truth).max()
    )


def test_gradients_of_channels_that_are_all_but_constant_are_float64s():
    """One element of 200 lies apart, so that the mean is far closer to the others than they are to
    each other.
    """
    x = (
        jnp.full((200, 4), 300.0, jnp.bfloat16)
        .at[17]
        .set(jnp.asarray([302.0, 298.0, 1000.0, 0.0], jnp.bfloat16))
    )
    weight, ones = jnp.asarray(1 + RNG.normal(size=x.shape), jnp.bfloat16), jnp.ones((1, 4))

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        y, _, _ = normalize(x, scale, None, region=Region((0,)), epsilon=1e-5, dtype=jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32) * weight.astype(jnp.float32))

    by_x, by_scale = jax.jit(jax.grad(loss, (0, 1)))(x, ones)
    wide, ct = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    normal, root = exact(x, (0,), 1e-5), 1 / np.sqrt(wide.var(0) + 1e-5)
    along = (ct * normal).mean(0)
    np.testing.assert_allclose(by_scale[0], along * 200, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(
        np.asarray(by_x, np.float64),
        root * (ct - ct.mean(0) - normal * along),
        rtol=2**-8,
        atol=1e-4 * root.max(),
    )


def backward(region: Region) -> list[Any]:
    """The operations of backward, with a scale and a bias of channels."""

    def pullback(x: jax.Array, scale: jax.Array, bias: jax.Array, ct: jax.Array) -> Any:
        forward = functools.partial(normalize, region=region, epsilon=1e-5, dtype=jnp.bfloat16)
        return jax.vjp(lambda *args: forward(*args)[0], x, scale, bias)[1](ct)

    x, scale = (
        jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.float32),
    )
    return [site for site in walk(jax.make_jaxpr(pullback)(x, scale, scale, x)) if site.is_backward]


# x - centre; of the others, for channels: the cotangent by that, by the factor, and that by a
# number; the sum of the two and another number. For rows: the cotangent by the scale, by the root
# and by x - centre, that by the root and by the cotangent for the scale's gradient, and by a
# number.
@pytest.mark.parametrize(
    ("region", "counts"),
    [
        (Region((0, 1, 2)), {"sub": 1, "mul": 3, "add_any": 2}),
        (Region((1, 2), groups=2), {"sub": 1, "mul": 3, "add_any": 2}),
        (Region((3,)), {"sub": 1, "mul": 6, "add_any": 2}),
    ],
)
def test_elements_are_multiplied_and_added_to_as_seldom_as_can_be(region, counts):
    """Numbers of a channel or a row are computed before they meet its elements."""
    sites = backward(region)
    of_elements = [
        site.name for site in sites if getattr(site.equation.outvars[0].aval, "shape", ()) == SHAPE
    ]
    assert {name: of_elements.count(name) for name in counts} == counts


def test_gradients_of_scale_and_bias_meet_a_barrier_without_axes_of_size_one():
    """Of XLA for TPUs each that has them would get two kernels of its own."""
    barriers = [
        site.equation for site in backward(Region((3,))) if site.name == "optimization_barrier"
    ]
    assert [[v.aval.shape for v in barrier.invars] for barrier in barriers] == [[(8,), (8,)]]


def test_statistics_that_may_not_be_written_are_refused_as_by_flax():
    x = images("bfloat16")
    layer = linen.BatchNorm(use_running_average=False)
    variables: Any = flax_linen.BatchNorm(use_running_average=False).init(
        jax.random.key(0), x.astype(jnp.float32)
    )
    with use_policy("bf16"), pytest.raises(errors.ModifyScopeVariableError):
        layer.apply(variables, x)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm"])
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_nothing_normalises_to_nothing(wing, name, shape):
    assert normalise(wing, name, jnp.zeros(shape, "bfloat16"), "bfloat16")[0].shape == shape
