"""Normalisations of data far from zero, against float64, forward and backward, and their running
statistics: what Flax's get wrong in half precision, and ours of both wings get right.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors

from mpmodules import linen, nnx
from mpmodules.functions.normalization import Region, normalize
from policy.programs.reading.walk import walk
from policy.testing import assert_close_in_ulps
from tests.mpmodules.norm_layers import NORMS, WINGS, built, exact, leaves_named, normalised

HALVES = ["bfloat16", "float16"]
RNG = np.random.default_rng(0)
SHAPE = (4, 5, 5, 8)
MEANS = np.linspace(-1500.0, 1500.0, 8)  # another for each channel
OF_A_MEAN = [name for name in NORMS if name != "RMSNorm"]
both_wings = pytest.mark.parametrize("wing", [linen, nnx], ids=["linen", "nnx"])


def images(half: str) -> jax.Array:
    return jnp.asarray(MEANS * 0.6 + RNG.normal(size=SHAPE) * (1 + np.arange(8)), half)


def far_from_zero(offset: float = 1000.0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.asarray(offset + np.random.default_rng(0).normal(size=shape), np.float32)


def with_values(variables: Any, **values: Any) -> Any:
    """Puts other values in the variables of those names."""

    def value(path: Any, leaf: Any) -> Any:
        names = [name for name in values if f"'{name}'" in jax.tree_util.keystr(path)]
        return jnp.full_like(leaf, values[names[0]]) if names else leaf

    return jax.tree_util.tree_map_with_path(value, variables)


@pytest.mark.parametrize("data", ["offset channels", "far from zero", "far from zero in float32"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_norms_are_within_one_ulp_of_the_output_dtype_far_from_zero(wing, name, half, data):
    x = images(half) if data == "offset channels" else jnp.asarray(far_from_zero(), half)
    x = jnp.asarray(far_from_zero()) if data.endswith("float32") else x
    y = normalised(wing, name, x, dtype_policy=f"p=f32,c={half},o={half}")
    assert y.dtype == half
    # Next to zero, float32's own last place at 1000 is what limits it.
    floor = 2.0**-5 if data == "offset channels" else 0.5
    assert_close_in_ulps(y, exact(name, x), 1, half, floor=floor)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_norms_that_return_float32_round_nothing_and_have_float64s_gradients(wing, name, policy):
    x, step = far_from_zero(shape=(4, 4, 4, 8)), 1e-4
    # A rounding of the input to bfloat16 would be off by 4.
    variables, call = built(wing, name, x, dtype_policy=policy)
    y = call(variables, x)[0]
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact(name, x), atol=3e-4)
    weights = np.random.default_rng(1).normal(size=x.shape)
    places = np.random.default_rng(2).choice(x.size, 48, replace=False)
    truth, wide = np.zeros(len(places)), np.asarray(x, np.float64)
    for i, place in enumerate(places):  # central differences
        shift = np.zeros(x.size)
        shift[place] = step
        shift = shift.reshape(x.shape)
        change = exact(name, wide + shift) - exact(name, wide - shift)
        truth[i] = (change * weights).sum() / (2 * step)
    found = jax.grad(lambda x: (call(variables, x)[0] * jnp.asarray(weights, "float32")).sum())(x)
    assert found.dtype == jnp.float32
    found = found.reshape(-1)[places]
    np.testing.assert_allclose(found, truth, atol=5e-4 * np.abs(truth).max())


@pytest.mark.parametrize("name", OF_A_MEAN)
@both_wings
def test_a_fast_variance_given_by_the_user_is_obeyed(wing, name):
    x = far_from_zero(shape=(64, 256))[:, None]
    theirs = WINGS["linen" if wing is linen else "nnx"][1]
    for fast, policy in ((True, "float32"), (False, "float32"), (False, None)):
        ours = normalised(wing, name, x, dtype_policy=policy, use_fast_variance=fast)
        expected = normalised(theirs, name, x, use_fast_variance=fast)
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=0 if fast else 1e-6)
    chosen = normalised(wing, name, x, dtype_policy="float32", use_fast_variance=None)
    np.testing.assert_array_equal(chosen, normalised(wing, name, x, dtype_policy="float32"))


@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_a_scale_that_half_cannot_hold_is_read_in_float32(wing, name):
    x = far_from_zero(0.0)
    variables, call = built(wing, name, x, dtype_policy="mixed_bfloat16")
    scaled = with_values(variables, scale=1.003)  # 1 in bfloat16
    before, after = call(variables, x)[0], call(scaled, x)[0]
    np.testing.assert_allclose(after, np.float32(1.003) * before, rtol=1e-6)


# --- running statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
@both_wings
def test_running_statistics_are_those_of_the_input_as_it_came(wing, half):
    x = images(half)
    variables, call = built(wing, "BatchNorm", x, momentum=0.75, dtype_policy=f"p=f32,c={half}")
    updated, wide = call(variables, x)[1], np.asarray(x, np.float64)
    mean, variance = leaves_named(updated, "mean", "var")
    assert {mean.dtype, variance.dtype} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(mean, 0.25 * wide.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(variance, 0.75 + 0.25 * wide.var((0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("policy", ["c=f16", "mixed_float16", None])
@pytest.mark.parametrize("training", [True, False])
@both_wings
def test_batch_norm_of_a_large_variance_in_float16_is_exact(wing, training, policy):
    x = np.asarray(300 * np.random.default_rng(0).normal(size=(256, 4)), np.float16)
    given = {"dtype": jnp.float16} if policy is None else {"dtype_policy": policy}
    variables, call = built(wing, "BatchNorm", x, **given | {"use_running_average": not training})
    y, updated = call(with_values(variables, mean=0.25, var=1e5), x)
    running = (np.asarray(x, np.float64) - 0.25) / np.sqrt(1e5 + 1e-5)
    truth = exact("BatchNorm", x) if training else running
    assert_close_in_ulps(y, truth, 1, jnp.float16, floor=0.5)
    (found,) = leaves_named(updated, "var")
    expected = 0.99 * 1e5 + 0.01 * np.asarray(x, np.float64).var(0) if training else 1e5
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@both_wings
def test_masked_and_distributed_norms_take_two_passes_and_stay_accurate(wing):
    x = far_from_zero(shape=(64, 256))
    mask = jnp.arange(256)[None] < 128
    variables, call = built(wing, "LayerNorm", x, dtype_policy="float32")
    kept = np.asarray(x, np.float64)[:, :128]
    deviation = np.asarray(x, np.float64) - kept.mean(-1, keepdims=True)
    truth = deviation / np.sqrt(kept.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(call(variables, x, mask=mask)[0], truth, atol=1e-3)

    def over_devices(name: str, x: Any, **options: Any) -> Any:
        return jax.vmap(
            lambda x: normalised(wing, name, x, axis_name="devices", **options), axis_name="devices"
        )(x)

    halves = jnp.asarray(x).reshape(64, 2, 128).swapaxes(0, 1)
    plain: dict[str, Any] = {"use_scale": False, "use_bias": False, "dtype_policy": "float32"}
    joined = over_devices("LayerNorm", halves, **plain).swapaxes(0, 1).reshape(64, 256)
    np.testing.assert_allclose(joined, exact("LayerNorm", x), atol=1e-3)
    x = images("float16")
    y = over_devices("BatchNorm", x[:, None], dtype_policy="f16")[:, 0]
    assert_close_in_ulps(y, exact("BatchNorm", x), 8, floor=2.0**-5)  # its data is not shifted


def test_statistics_that_may_not_be_written_are_refused_as_by_flax():
    x, layer = images("bfloat16"), linen.BatchNorm(use_running_average=False, dtype_policy="bf16")
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(errors.ModifyScopeVariableError):
        layer.apply(variables, x)


# --- backward -------------------------------------------------------------------------------------


def test_gradients_of_channels_that_are_all_but_constant_are_float64s():
    """One element of 200 lies apart, so that the mean is far closer to the others than they are to
    each other.
    """
    apart = jnp.asarray([302.0, 298.0, 1000.0, 0.0], jnp.bfloat16)
    x = jnp.full((200, 4), 300.0, jnp.bfloat16).at[17].set(apart)
    weight, ones = jnp.asarray(1 + RNG.normal(size=x.shape), jnp.bfloat16), jnp.ones((1, 4))

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        y, _, _ = normalize(x, scale, None, region=Region((0,)), epsilon=1e-5, dtype=jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32) * weight.astype(jnp.float32))

    by_x, by_scale = jax.jit(jax.grad(loss, (0, 1)))(x, ones)
    wide, ct = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    normal, root = exact("BatchNorm", x), 1 / np.sqrt(wide.var(0) + 1e-5)
    along = (ct * normal).mean(0)
    np.testing.assert_allclose(by_scale[0], along * 200, rtol=1e-4, atol=1e-3)
    truth = root * (ct - ct.mean(0) - normal * along)
    by_x = np.asarray(by_x, np.float64)
    np.testing.assert_allclose(by_x, truth, rtol=2**-8, atol=1e-4 * root.max())


def backward(region: Region) -> list[Any]:
    """The operations of backward, with a scale and a bias of channels."""

    def pullback(x: jax.Array, scale: jax.Array, bias: jax.Array, ct: jax.Array) -> Any:
        forward = functools.partial(normalize, region=region, epsilon=1e-5, dtype=jnp.bfloat16)
        return jax.vjp(lambda *args: forward(*args)[0], x, scale, bias)[1](ct)

    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.float32)
    return [site for site in walk(jax.make_jaxpr(pullback)(x, scale, scale, x)) if site.is_backward]


# x - centre; of the others, for channels: the cotangent by that, by the factor, and that by a
# number; the sum of the two and another number. For rows: the cotangent by the scale, by the root
# and by x - centre, that by the root and by the cotangent for the scale's gradient, and by a
# number.
@pytest.mark.parametrize(
    ("region", "products"),
    [(Region((0, 1, 2)), 3), (Region((1, 2), groups=2), 3), (Region((3,)), 6)],
)
def test_elements_are_multiplied_and_added_to_as_seldom_as_can_be(region, products):
    """Numbers of a channel or a row are computed before they meet its elements. Gradients of scale
    and bias meet a barrier without axes of size one: of XLA for TPUs each that has them would get
    two kernels of its own.
    """
    sites = backward(region)
    of_elements = [
        site.name for site in sites if getattr(site.equation.outvars[0].aval, "shape", ()) == SHAPE
    ]
    counts = {name: of_elements.count(name) for name in ("sub", "mul", "add_any")}
    assert counts == {"sub": 1, "mul": products, "add_any": 2}
    barriers = [site.equation for site in sites if site.name == "optimization_barrier"]
    if region == Region((3,)):
        assert [[v.aval.shape for v in barrier.invars] for barrier in barriers] == [[(8,), (8,)]]
