"""A BatchNorm that sees no element, or whose mask keeps none, leaves its running statistics as they
were.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mpmodules.norm_layers import WINGS, built, leaves_named

FEATURES = 3
VALUES = {
    "scale": np.full(FEATURES, 1.5, np.float32),
    "bias": np.full(FEATURES, 0.1, np.float32),
    "mean": np.asarray([0.5, -1.0, 2.0], np.float32),
    "var": np.asarray([2.0, 0.25, 1.0], np.float32),
}
MEAN, VARIANCE = VALUES["mean"], VALUES["var"]
POLICIES = ["float32", "mixed_bfloat16", "bfloat16", "mixed_float16", "p=f16,c=f16,o=f32"]
X = np.asarray(np.random.default_rng(0).normal(2, 3, (4, 5, FEATURES)), np.float32)
EACH_WING = pytest.mark.parametrize("wing", WINGS)
MASKS: dict[str, Any] = {
    "all": np.zeros((4, 5, FEATURES), bool),
    "rows": np.zeros((4, 1, 1), bool),
    "one feature": np.ones(X.shape, bool) & (np.arange(3) != 1),
}


def step(
    wing: str, x: Any, policy: str | None, mask: Any = None, flax: bool = False, **options: Any
) -> dict[str, Any]:
    """Returns a training call's result, its running statistics, and the gradients of a sum of
    squares, in float32.
    """
    given: dict[str, Any] = {} if policy is None else {"dtype_policy": policy}
    modules = WINGS[wing][flax]
    like = jnp.zeros((1, FEATURES))
    variables, call = built(modules, "BatchNorm", like, jit=False, **options, **given)

    def value(path: Any, leaf: Any) -> Any:
        (name,) = [name for name in VALUES if f"'{name}'" in jax.tree_util.keystr(path)]
        return jnp.asarray(VALUES[name], leaf.dtype)

    variables = jax.tree_util.tree_map_with_path(value, variables)

    def loss(variables: Any, x: Any) -> tuple[Any, Any]:
        y, after = call(variables, x, mask=mask)
        squares = jnp.square(y.astype(jnp.float32))
        return squares.sum(where=None if mask is None else mask), (y, after)

    gradients, (y, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
    found = {"y": y, "x": gradients[1]}
    found |= {name: leaves_named(gradients[0], name)[0] for name in ("scale", "bias")}
    found |= {name: leaves_named(after, name)[0] for name in ("mean", "var")}
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def assert_kept(found: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["mean"], MEAN)
    np.testing.assert_array_equal(found["var"], VARIANCE)
    assert all(np.isfinite(value).all() for value in found.values())


@EACH_WING
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_batch_leaves_running_statistics_as_they_were(wing, policy, dtype):
    assert_kept(step(wing, jnp.zeros((0, FEATURES), dtype), policy))


OPTIONS: list[dict[str, Any]] = [
    {"use_fast_variance": True},
    {"use_fast_variance": False},
    {"momentum": 0.0},
    {"dtype": jnp.float32},
]


@pytest.mark.filterwarnings("ignore:.* has an explicit dtype:policy.DtypePolicyWarning")
@EACH_WING
@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_batch_changes_nothing_whatever_the_options(wing, options):
    assert_kept(step(wing, jnp.zeros((4, 0, FEATURES), jnp.bfloat16), "mixed_bfloat16", **options))


@EACH_WING
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_where_a_mask_keeps_nothing_the_running_statistics_stay_and_normalise(wing, policy, mask):
    dtype = "bfloat16" if "bfloat16" in policy else "float32"
    x = jnp.asarray(X, dtype)
    found = step(wing, x, policy, mask=MASKS[mask])
    if mask == "one feature":
        assert (found["mean"][1], found["var"][1]) == (MEAN[1], VARIANCE[1])
        wide = np.asarray(x, np.float32)[..., 0].mean()
        np.testing.assert_allclose(found["mean"][0], 0.99 * MEAN[0] + 0.01 * wide, rtol=1e-5)
        assert all(np.isfinite(value).all() for value in found.values())
        return
    assert_kept(found)
    expected = (np.asarray(x, np.float32) - MEAN) / np.sqrt(VARIANCE + 1e-5) * 1.5 + 0.1
    np.testing.assert_allclose(found["y"], expected, rtol=1e-2, atol=2e-2)


@EACH_WING
@pytest.mark.parametrize("fast", [True, False])
def test_a_mask_that_keeps_something_does_what_flax_does(wing, fast):
    options: dict[str, Any] = {"mask": X[..., :1] > 1, "use_fast_variance": fast}
    found = step(wing, jnp.asarray(X), "float32", **options)
    expected = step(wing, jnp.asarray(X), None, flax=True, **options)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@EACH_WING
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
@EACH_WING
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
        np.testing.assert_allclose(values[kept], expected[name][kept], rtol=1e-5, atol=1e-5)


@EACH_WING
def test_without_a_policy_an_empty_batch_is_flaxs(wing):
    found = step(wing, jnp.zeros((0, FEATURES)), None)
    expected = step(wing, jnp.zeros((0, FEATURES)), None, flax=True)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert name not in ("mean", "var") or np.isnan(value).all()
