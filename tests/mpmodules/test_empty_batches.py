"""A BatchNorm that sees no element, or whose mask keeps none, leaves its running statistics as they
were.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx

FEATURES = 3
MEAN, VARIANCE = np.asarray([0.5, -1.0, 2.0], np.float32), np.asarray([2.0, 0.25, 1.0], np.float32)
POLICIES = ["float32", "mixed_bfloat16", "bfloat16", "mixed_float16", "p=f16,c=f16,o=f32"]
X = np.asarray(np.random.default_rng(0).normal(2, 3, (4, 5, FEATURES)), np.float32)
NONE_KEPT = {"all": np.zeros((4, 5, FEATURES), bool), "rows": np.zeros((4, 1, 1), bool)}


def step(
    wing: str, x: Any, policy: str | None, mask: Any = None, flax: bool = False, **options: Any
) -> dict[str, Any]:
    """Returns a training call's result, its running statistics, and the gradients of a sum of
    squares, in float32.
    """
    given: dict[str, Any] = {} if policy is None else {"dtype_policy": policy}
    scale, bias = jnp.full(FEATURES, 1.5), jnp.full(FEATURES, 0.1)

    def linen_call(scale: Any, bias: Any, x: Any) -> tuple[Any, Any]:
        layer = (flax_linen if flax else linen).BatchNorm(
            use_running_average=False, **options, **given
        )
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": MEAN, "var": VARIANCE},
        }
        y, updated = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    def nnx_call(scale: Any, bias: Any, x: Any) -> tuple[Any, Any]:
        layer = (flax_nnx if flax else nnx).BatchNorm(
            FEATURES, rngs=flax_nnx.Rngs(0), **options, **given
        )
        for name, value in {"scale": scale, "bias": bias, "mean": MEAN, "var": VARIANCE}.items():
            getattr(layer, name).set_value(jnp.asarray(value))
        y = layer(x, use_running_average=False, mask=mask)
        return y, {"mean": layer.mean[...], "var": layer.var[...]}

    def loss(*arguments: Any) -> tuple[Any, Any]:
        y, running = (linen_call if wing == "linen" else nnx_call)(*arguments)
        squares = jnp.square(y.astype(jnp.float32))
        return squares.sum(where=None if mask is None else mask), (y, running)

    gradients, (y, running) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(scale, bias, x)
    found = {"y": y, "scale": gradients[0], "bias": gradients[1], "x": gradients[2], **running}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def assert_kept(found: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["mean"], MEAN)
    np.testing.assert_array_equal(found["var"], VARIANCE)
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_empty_batch_leaves_running_statistics_as_they_were(wing, policy, dtype):
    assert_kept(step(wing, jnp.zeros((0, FEATURES), dtype), policy))


@pytest.mark.parametrize(
    "options", [{"use_fast_variance": True}, {"use_fast_variance": False}, {"momentum": 0.0}]
)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_empty_batch_changes_nothing_whatever_the_options(wing, options):
    assert_kept(step(wing, jnp.zeros((4, 0, FEATURES), jnp.bfloat16), "mixed_bfloat16", **options))


def test_an_empty_batch_changes_nothing_where_the_layer_has_a_dtype_of_its_own():
    with pytest.warns(UserWarning, match="dtype"):
        assert_kept(
            step(
                "linen", jnp.zeros((0, FEATURES), jnp.bfloat16), "mixed_bfloat16", dtype=jnp.float32
            )
        )


@pytest.mark.parametrize("mask", NONE_KEPT)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_a_mask_that_keeps_nothing_normalises_by_the_running_statistics(wing, policy, mask):
    dtype = "bfloat16" if "bfloat16" in policy else "float32"
    found = step(wing, jnp.asarray(X, dtype), policy, mask=NONE_KEPT[mask])
    assert_kept(found)
    expected = (np.asarray(jnp.asarray(X, dtype), np.float32) - MEAN) / np.sqrt(
        VARIANCE + 1e-5
    ) * 1.5 + 0.1
    np.testing.assert_allclose(found["y"], expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_a_feature_of_which_a_mask_keeps_nothing_keeps_its_statistics(wing):
    mask = np.ones(X.shape, bool)
    mask[..., 1] = False
    found = step(wing, jnp.asarray(X), "float32", mask=mask)
    assert all(np.isfinite(value).all() for value in found.values())
    assert (found["mean"][1], found["var"][1]) == (MEAN[1], VARIANCE[1])
    np.testing.assert_allclose(
        found["mean"][0], 0.99 * MEAN[0] + 0.01 * X[..., 0].mean(), rtol=1e-5
    )


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_a_mask_that_keeps_something_does_what_flax_does(wing, fast):
    mask = X[..., :1] > 1
    found = step(wing, jnp.asarray(X), "float32", mask=mask, use_fast_variance=fast)
    expected = step(wing, jnp.asarray(X), None, mask=mask, use_fast_variance=fast, flax=True)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_devices_whose_mask_keeps_nothing_are_left_out(wing):
    mask = np.ones(X.shape, bool)
    mask[1], mask[2] = False, False

    def everywhere(x: Any, mask: Any) -> dict[str, Any]:
        call = jax.vmap(
            lambda x, mask: step(wing, x, "float32", mask=mask, axis_name="devices"),
            axis_name="devices",
        )
        return {name: np.asarray(value) for name, value in call(x[:, None], mask[:, None]).items()}

    found, expected = everywhere(X, mask), everywhere(X[[0, 3]], mask[[0, 3]])
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[name][1], expected[name][0], rtol=1e-5)
    np.testing.assert_allclose(found["y"][[0, 3]], expected["y"], rtol=1e-5)
    assert_kept({name: value[0] for name, value in everywhere(X, np.zeros(X.shape, bool)).items()})


@pytest.mark.parametrize("fast", [None, True, False])
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_statistics_over_devices_are_those_of_all_rows_that_a_mask_keeps(wing, fast):
    mask = np.arange(X[..., :1].size).reshape(4, 5, 1) % 4 > np.arange(4).reshape(4, 1, 1) - 1
    options: dict[str, Any] = {} if fast is None else {"use_fast_variance": fast}
    found = jax.vmap(
        lambda x, mask: step(wing, x, "float32", mask=mask, axis_name="devices", **options),
        axis_name="devices",
    )(X, mask)
    assert len({int(each.sum()) for each in mask}) > 2
    expected = step(wing, X.reshape(-1, FEATURES), "float32", mask=mask.reshape(-1, 1), **options)
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[name], [expected[name]] * 4, rtol=1e-5)
    kept = np.broadcast_to(mask, X.shape).reshape(-1, FEATURES)
    for name in ("y", "x"):
        values = np.asarray(found[name]).reshape(-1, FEATURES)
        np.testing.assert_allclose(values[kept], expected[name][kept], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_without_a_policy_an_empty_batch_is_flax_s(wing):
    found = step(wing, jnp.zeros((0, FEATURES)), None)
    expected = step(wing, jnp.zeros((0, FEATURES)), None, flax=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert name not in ("mean", "var") or np.isnan(value).all()
