"""What Flax's normalisations get wrong in half precision or far from zero, and ours of both wings
get right, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy.testing import assert_close_in_ulps

KEY = jax.random.key(0)
HALVES = ("bfloat16", "float16")
NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "GroupNorm": {"num_groups": 1},
    "BatchNorm": {"use_running_average": False},
}
OF_A_MEAN = [name for name in NORMS if name != "RMSNorm"]
FLAX: dict[Any, Any] = {linen: flax_linen, nnx: flax_nnx}
both_wings = pytest.mark.parametrize("wing", [linen, nnx], ids=["linen", "nnx"])


def built(modules: Any, name: str, x: Any, **options: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the variables, and a call: variables and inputs to the result and new variables."""
    options = NORMS[name] | options
    if modules in (linen, flax_linen):
        layer = getattr(modules, name)(**options)

        def apply(variables: Any, x: Any, **kwargs: Any) -> Any:
            return layer.apply(variables, x, mutable=["batch_stats"], **kwargs)

        return layer.init(KEY, x), jax.jit(apply)
    layer = getattr(modules, name)(x.shape[-1], rngs=flax_nnx.Rngs(0), **options)
    graph, state = flax_nnx.split(layer)

    def call(state: Any, x: Any, **kwargs: Any) -> Any:
        copy = flax_nnx.merge(graph, state, copy=True)
        return copy(x, **kwargs), flax_nnx.state(copy)

    return state, jax.jit(call)


def normalised(modules: Any, name: str, x: Any, **options: Any) -> Any:
    variables, call = built(modules, name, x, **options)
    return call(variables, x)[0]


def with_values(variables: Any, **values: Any) -> Any:
    """Puts other values in the variables of those names."""

    def value(path: Any, leaf: Any) -> Any:
        names = [name for name in values if f"'{name}'" in jax.tree_util.keystr(path)]
        return jnp.full_like(leaf, values[names[0]]) if names else leaf

    return jax.tree_util.tree_map_with_path(value, variables)


def dtypes(variables: Any) -> dict[str, set[str]]:
    """The dtypes of the running statistics, and those of the parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    found: dict[str, set[str]] = {"statistics": set(), "parameters": set()}
    for path, leaf in leaves:
        is_statistic = any(f"'{n}'" in jax.tree_util.keystr(path) for n in ("mean", "var"))
        found["statistics" if is_statistic else "parameters"].add(leaf.dtype.name)
    return found


def far_from_zero(offset: float = 1000.0, shape: tuple[int, ...] = (64, 256)) -> np.ndarray:
    return np.asarray(offset + np.random.default_rng(0).normal(size=shape), np.float32)


def exact(name: str, x: Any) -> np.ndarray:
    """The result of a fresh layer, in float64."""
    x = np.asarray(x, np.float64)
    if name == "RMSNorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    axis, epsilon = (0, 1e-5) if name == "BatchNorm" else (-1, 1e-6)
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_norms_are_within_one_ulp_of_the_output_dtype_far_from_zero(wing, name, half, given):
    x = jnp.asarray(far_from_zero(), half if given == "half" else "float32")
    y = normalised(wing, name, x, dtype_policy=f"p=f32,c={half},o={half}")
    assert y.dtype == half
    # Next to zero, float32's own last place at 1000 is what limits it.
    assert_close_in_ulps(y, exact(name, x), 1, half, floor=0.5)


@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_norms_under_the_float32_preset_are_near_float64(wing, name):
    x = far_from_zero()
    np.testing.assert_allclose(
        normalised(wing, name, x, dtype_policy="float32"), exact(name, x), atol=3e-4
    )


@pytest.mark.parametrize("name", OF_A_MEAN)
@both_wings
def test_a_fast_variance_given_by_the_user_is_obeyed(wing, name):
    x = far_from_zero()
    for fast, policy in ((True, "float32"), (False, "float32"), (False, None)):
        ours = normalised(wing, name, x, dtype_policy=policy, use_fast_variance=fast)
        theirs = normalised(FLAX[wing], name, x, use_fast_variance=fast)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0 if fast else 1e-6)
    chosen = normalised(wing, name, x, dtype_policy="float32", use_fast_variance=None)
    np.testing.assert_array_equal(chosen, normalised(wing, name, x, dtype_policy="float32"))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_gradients_far_from_zero_are_near_float64s(wing, name, policy):
    x, step = far_from_zero(shape=(16, 32)), 1e-4
    weights = np.random.default_rng(1).normal(size=x.shape)
    truth, wide = np.zeros(x.shape), np.asarray(x, np.float64)
    for index in np.ndindex(x.shape):  # central differences
        shift = np.zeros(x.shape)
        shift[index] = step
        change = exact(name, wide + shift) - exact(name, wide - shift)
        truth[index] = (change * weights).sum() / (2 * step)
    variables, call = built(wing, name, x, dtype_policy=policy)
    weights = jnp.asarray(weights, jnp.float32)
    found = jax.grad(lambda x: (call(variables, x)[0] * weights).sum())(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, truth, atol=5e-4 * np.abs(truth).max())


@pytest.mark.parametrize("name", NORMS)
@both_wings
def test_a_scale_that_half_cannot_hold_is_read_in_float32(wing, name):
    x = far_from_zero(0.0)
    variables, call = built(wing, name, x, dtype_policy="mixed_bfloat16")
    scaled = with_values(variables, scale=1.003)  # 1 in bfloat16
    before, after = call(variables, x)[0], call(scaled, x)[0]
    np.testing.assert_allclose(after, np.float32(1.003) * before, rtol=1e-6)


@pytest.mark.parametrize("policy", ["c=f16", "mixed_float16", None])
@pytest.mark.parametrize("training", [True, False])
@both_wings
def test_batch_norm_of_a_large_variance_in_float16_is_exact(wing, training, policy):
    x = np.asarray(300 * np.random.default_rng(0).normal(size=(256, 4)), np.float16)
    given = {"dtype": jnp.float16} if policy is None else {"dtype_policy": policy}
    variables, call = built(wing, "BatchNorm", x, **given | {"use_running_average": not training})
    y, updated = call(with_values(variables, mean=0.25, var=1e5), x)
    running = (np.asarray(x, np.float64) - 0.25) / np.sqrt(1e5 + 1e-5)
    assert_close_in_ulps(
        y, exact("BatchNorm", x) if training else running, 1, jnp.float16, floor=0.5
    )
    assert dtypes(updated)["statistics"] == {"float32"}
    if training:
        expected = 0.99 * 1e5 + 0.01 * np.asarray(x, np.float64).var(0)
        found = [v for v in jax.tree.leaves(updated) if np.all(np.asarray(v) > 1e4)]
        np.testing.assert_allclose(found[0], expected, rtol=1e-5)


@both_wings
def test_running_statistics_are_float32_even_where_parameters_are_half(wing):
    x = far_from_zero()
    variables, call = built(wing, "BatchNorm", x, dtype_policy="bf16")
    for tree in (variables, call(variables, x)[1]):
        found = dtypes(tree)
        assert found["statistics"] == {"float32"} and found["parameters"] <= {"bfloat16"}


@both_wings
def test_masked_and_distributed_norms_take_two_passes_and_stay_accurate(wing):
    x = far_from_zero()
    mask = jnp.arange(256)[None] < 128
    variables, call = built(wing, "LayerNorm", x, dtype_policy="float32")
    kept = np.asarray(x, np.float64)[:, :128]
    truth = (np.asarray(x, np.float64) - kept.mean(-1, keepdims=True)) / np.sqrt(
        kept.var(-1, keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(call(variables, x, mask=mask)[0], truth, atol=1e-3)

    halves = jnp.asarray(x).reshape(64, 2, 128).swapaxes(0, 1)
    options: dict[str, Any] = {"axis_name": "batch", "use_scale": False, "use_bias": False}
    over_axis = jax.vmap(
        lambda x: normalised(wing, "LayerNorm", x, dtype_policy="float32", **options),
        axis_name="batch",
    )(halves)
    joined = np.asarray(over_axis).swapaxes(0, 1).reshape(64, 256)
    np.testing.assert_allclose(joined, exact("LayerNorm", x), atol=1e-3)
