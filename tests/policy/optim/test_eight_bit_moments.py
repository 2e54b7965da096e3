"""`moment_dtype` of "int8" and "float8": which moments are codes, their bytes, and their steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import apply_gradients, mixed_precision
from policy.optim import convert
from policy.optim.blockwise import FORMATS
from policy.optim.moments import StoredInner, moment_targets, widen_moments

KEY = jax.random.key(1)
INT8, FLOAT8 = ({"mu": name, "nu": name} for name in ("int8", "float8"))
PARAMS = {"w": jnp.full((32, 160), 0.5), "b": jnp.ones(160)}
CODES = {"int8": ("int8", "uint8"), "float8": ("float8_e4m3fn", "float8_e5m2")}


def wrapped(tx: Any, moment_dtype: Any = None, key: Any = KEY, **options: Any) -> Any:
    key = None if moment_dtype is None else key
    return mixed_precision(tx, "float32", moment_dtype=moment_dtype, key=key, **options)


def gradients(step: Any, params: Any = PARAMS) -> Any:
    key = jax.random.fold_in(jax.random.key(7), step)
    return jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)


def wide(tx: Any, state: Any, params: Any = PARAMS) -> Any:
    """The inner state with float32 moments."""
    targets = moment_targets(state.inner, params, tx.moment_dtypes)
    return widen_moments(StoredInner(state.inner, state.moment_scales), targets)


@functools.cache
def trained(name: str) -> Any:
    """Transform, params and state after three steps of Adam."""
    tx = wrapped(optax.adam(1e-2), {"mu": name, "nu": name}, loss_scale=8.0)
    params, state = PARAMS, tx.init(PARAMS)
    for step in range(3):
        params, state, finite = apply_gradients(tx, params, state, gradients(step))
        assert finite
    return tx, params, state


def shapes(tree: Any) -> Any:
    return [(x.shape, str(x.dtype), x.weak_type) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_both_moments_of_a_large_leaf_take_two_bytes_and_their_scales(name):
    tx = wrapped(optax.adam(1e-3), {"mu": name, "nu": name})
    params = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    state: Any = jax.eval_shape(tx.init, params)
    adam, scales = state.inner[0], state.moment_scales[0]
    assert (str(adam.mu["w"].dtype), str(adam.nu["w"].dtype)) == CODES[name]
    assert adam.mu["w"].shape == adam.nu["w"].shape == (1024, 4096)
    assert scales.mu["w"].shape == scales.nu["w"].shape == (1024, 32)
    moments = jax.tree.leaves((adam.mu, adam.nu, scales.mu, scales.nu))
    taken = sum(x.size * x.dtype.itemsize for x in moments) / (1024 * 4096)
    assert taken == 2 + 2 * 4 / 128 < 2.1


def test_small_leaves_and_those_of_a_short_last_axis_stay_float32():
    shapes = {"w": (16, 256), "small": (16, 255), "short": (4096, 15), "none": (0, 8), "scalar": ()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state: Any = jax.eval_shape(wrapped(optax.adam(1e-3), INT8).init, params)
    dtypes = {name: str(x.dtype) for name, x in state.inner[0].nu.items()}
    assert dtypes == dict.fromkeys(shapes, "float32") | {"w": "uint8"}
    assert [x.shape for x in jax.tree.leaves(state.moment_scales)] == [(16, 2)] * 2


@pytest.mark.parametrize(
    ("asked", "mu", "nu"),
    [
        ("int8", "int8", "float32"),
        ("float8", "float8_e4m3fn", "float32"),
        ({"mu": jnp.int8, "nu": "bfloat16"}, "int8", "bfloat16"),
        ({"mu": "bf16", "nu": "float8"}, "bfloat16", "float8_e5m2"),
        ({"mu": "float8_e4m3fn", "nu": "uint8"}, "float8_e4m3fn", "uint8"),
    ],
)
def test_a_bare_dtype_is_the_first_moments_and_fields_may_differ(asked, mu, nu):
    tx = wrapped(optax.adam(1e-3), asked)
    adam: Any = jax.eval_shape(tx.init, PARAMS).inner[0]
    assert (str(adam.mu["w"].dtype), str(adam.nu["w"].dtype)) == (mu, nu)
    assert (
        tx.moment_dtypes
        == mixed_precision(
            optax.adam(1e-3), "float32", moment_dtype=tx.moment_dtypes, key=KEY
        ).moment_dtypes
    )


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_moments_are_those_of_float32_to_the_steps_of_their_codes(name):
    tx, params, state = trained(name)
    plain = wrapped(optax.adam(1e-2))
    truth: Any = PARAMS
    exact: Any = plain.init(PARAMS)
    for step in range(3):
        truth, exact, _ = apply_gradients(plain, truth, exact, gradients(step))
    adam = wide(tx, state)[0]
    magnitudes = sum(0.1 * np.abs(np.asarray(gradients(step)["w"])) for step in range(3))
    for field in ("mu", "nu"):
        form = FORMATS[getattr(state.inner[0], field)["w"].dtype]
        got, right = (
            np.asarray(getattr(x, field)["w"], np.float64) for x in (adam, exact.inner[0])
        )
        # each of three steps rounds by less than a step between codes; terms of mu may cancel
        largest = magnitudes if field == "mu" else right
        room = 3 * 2.0**-form.fraction_bits * largest + 1e-9
        np.testing.assert_array_less(np.abs(got - right), room)
        np.testing.assert_array_equal(
            getattr(adam, field)["b"], getattr(exact.inner[0], field)["b"]
        )
    np.testing.assert_allclose(params["w"], truth["w"], atol=0.3 * 3e-2)
    np.testing.assert_array_equal(params["b"], truth["b"])


@pytest.mark.parametrize("options", [{}, {"check_results": True}])
def test_a_step_that_is_not_finite_keeps_codes_and_scales(options):
    _, params, before = trained("int8")
    tx = wrapped(optax.adam(1e-2), INT8, loss_scale=8.0, **options)
    bad = {**gradients(3), "w": gradients(3)["w"].at[3, 5].set(jnp.nan)}
    new, after, finite = apply_gradients(tx, params, before, bad)
    assert not finite
    for a, b in zip(
        jax.tree.leaves((new, after.inner, after.moment_scales)),
        jax.tree.leaves((params, before.inner, before.moment_scales)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert apply_gradients(tx, params, before, gradients(3))[2]


def test_fields_steps_and_leaves_are_rounded_by_bits_of_their_own():
    params = {"a": jnp.zeros((32, 128)), "b": jnp.zeros((32, 128))}
    tx = wrapped(optax.trace(0.0), "int8")
    value = jnp.full((32, 128), 0.55).at[:, 0].set(1.0)  # between two codes
    state: Any = tx.init(params)
    seen = []
    for _ in range(2):
        state = apply_gradients(tx, params, state, {"a": value, "b": value})[1]
        seen += [np.asarray(state.inner.trace[name]) for name in "ab"]
    assert all(len(np.unique(x[:, 1:])) == 2 for x in seen)
    assert all((seen[i] != seen[j]).any() for i in range(4) for j in range(i))


OTHERS = [None, "bfloat16", {"mu": "float8", "nu": "int8"}, {"nu": "int8"}]


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_moment_dtype_is_refused_by_name_and_converted(other):
    tx, params, state = trained("int8")
    loads = wrapped(optax.adam(1e-2), other, loss_scale=8.0)
    text = r"other arrays than tx stores for .*0/(mu|nu)/w is \w+\[32, 160\] instead of \w+"
    with pytest.raises(ValueError, match=text):
        apply_gradients(loads, params, state, gradients(3))
    made = convert(state, params, to=loads)
    assert shapes(made) == shapes(loads.init(params))
    assert jax.tree.structure(made) == jax.tree.structure(loads.init(params))
    new = made.inner if other is None else wide(loads, made)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(wide(tx, state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-4, atol=2.0**-9 * np.abs(b).max())
    _, made, finite = apply_gradients(loads, params, made, gradients(3))
    assert finite
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, made, gradients(3))
    back = convert(made, params, to=tx)
    assert shapes(back) == shapes(state)
    assert apply_gradients(tx, params, back, gradients(3))[2]


def test_scales_that_are_missing_or_of_another_shape_are_refused_by_name():
    tx, params, state = trained("int8")
    half = jax.tree.map(lambda x: x[:, :1], state.moment_scales)
    texts = (
        "moment_scales are MaskedNode, .* are MaskedNode instead of",
        r"scales of 0/mu/w are float32\[32, 1\] instead of float32\[32, 2\]",
    )
    for scales, text in zip((optax.MaskedNode(), half), texts, strict=True):
        with pytest.raises(ValueError, match=text):
            apply_gradients(tx, params, state._replace(moment_scales=scales), gradients(3))
    small = {"b": jnp.ones(4)}
    made = wrapped(optax.adam(1e-2), INT8).init(small)
    with pytest.raises(ValueError, match="moment_scales are tuple"):
        apply_gradients(wrapped(optax.adam(1e-2)), small, made, small)
