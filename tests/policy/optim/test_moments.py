"""`moment_dtype`: which moments are stored narrow, how well they do, and which are refused."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import apply_gradients, mixed_precision

KEY = jax.random.key(0)
PARAMS = {"w": jnp.full((2, 3), 1.5)}
GRADIENTS = {"w": jnp.full((2, 3), 0.3)}


def wrapped(tx: Any, **options: Any) -> Any:
    return mixed_precision(tx, "float32", **options)


def fields(tx, params=PARAMS):
    leaves = jax.tree_util.tree_leaves_with_path(tx.init(params).inner)
    names = {
        path: [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        for path, _ in leaves
    }
    return {
        names[path][-1]: leaf.dtype.name
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


@pytest.mark.parametrize(
    ("tx", "narrow"),
    [
        (optax.adamw(1e-3), "mu"),
        (optax.lion(1e-3), "mu"),
        (optax.adan(1e-3), "m"),
        (optax.sgd(1e-3, momentum=0.9), "trace"),
        (optax.ema(0.9), "ema"),
        (optax.contrib.ademamix(1e-3), "m1"),
        (optax.contrib.prodigy(), "exp_avg"),
        (optax.MultiSteps(optax.adam(1e-3), 3), "mu"),
        (optax.masked(optax.adam(1e-3), {"w": True}), "mu"),
        (optax.inject_hyperparams(optax.adam)(1e-3), "mu"),
    ],
)
def test_a_dtype_means_the_first_moments_and_nothing_else(tx, narrow):
    plain, ours = fields(wrapped(tx)), fields(wrapped(tx, moment_dtype="bfloat16"))
    assert ours == {**plain, narrow: "bfloat16"}


class Named(NamedTuple):
    mu: Any
    nu: Any


def test_a_param_that_is_called_as_a_moment_is_none():
    params = Named(jnp.ones(2), jnp.ones(3))
    state = wrapped(optax.adam(1e-3), moment_dtype="bfloat16").init(params).inner[0]
    assert {leaf.dtype.name for leaf in state.mu} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in state.nu} == {"float32"}


@pytest.mark.parametrize("key", [None, KEY])
def test_moments_keep_their_dtype_in_a_scan_and_are_computed_in_float32(key):
    seen = []
    adam = optax.adam(1e-2)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(state[0].mu["w"].dtype)
        return adam.update(updates, state, params)

    tx = wrapped(optax.GradientTransformation(adam.init, update), moment_dtype="bfloat16", key=key)
    step: Any = lambda carry, _: (apply_gradients(tx, carry[0], carry[1], GRADIENTS)[:2], None)  # noqa: E731
    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=20)
    assert set(seen) == {jnp.dtype(jnp.float32)}
    assert state.inner[0].mu["w"].dtype == jnp.bfloat16
    exact = 0.3 * (1 - 0.9**20)
    # each step rounds by half an ulp of bfloat16 at most, and forgets a tenth of it: 10 · 2^-9
    np.testing.assert_allclose(
        np.asarray(state.inner[0].mu["w"], np.float64), exact, rtol=10 * 2.0**-9
    )
    np.testing.assert_allclose(params["w"], 1.5 - 20 * 1e-2, rtol=1e-3)


def test_a_bfloat16_second_moment_decays_with_stochastic_rounding():
    params, gradients = jnp.ones(4096), jnp.zeros(4096)
    tx = wrapped(optax.adam(0.0, b2=0.999), moment_dtype={"nu": "bfloat16"}, key=KEY)
    state = tx.init(params)
    started = state._replace(
        inner=(state.inner[0]._replace(nu=jnp.ones(4096, jnp.bfloat16)), *state.inner[1:])
    )
    step: Any = lambda state, _: (apply_gradients(tx, params, state, gradients)[1], None)  # noqa: E731
    state: Any = jax.lax.scan(step, started, None, length=1000)[0]
    nu = np.asarray(state.inner[0].nu, np.float64)
    np.testing.assert_allclose(nu.mean(), 0.999**1000, rtol=0.02)


def test_a_moment_beyond_float16_is_its_largest_number():
    tx = wrapped(optax.trace(0.9), moment_dtype="float16")
    params = jnp.ones(2)
    state: Any
    _, state, finite = apply_gradients(tx, params, tx.init(params), jnp.asarray([1e6, -1e6]))
    assert finite
    np.testing.assert_array_equal(state.inner.trace, np.asarray([65504, -65504], np.float16))


ADAM, BF16, SUM = optax.adam(1e-3), "bfloat16", "the field is a running sum"
COPY = "the field is a copy of the params"
Z, RATE = {"z": BF16}, r"'nu' is bfloat16, but its decay rate is 0\.999\. Above 0\.98, rounding"
SQUARES = {"sum_of_squares": BF16}


@pytest.mark.parametrize(
    ("tx", "moment_dtype", "key", "text"),
    [
        (ADAM, {"nu": BF16}, None, RATE),
        (optax.MultiSteps(ADAM, 3), {"nu": BF16}, None, RATE),
        # at a count of 1e5
        (optax.scale_by_factored_rms(decay_rate=0.8), {"v": BF16}, None, "decay rate is 0.9999"),
        (optax.adagrad(1e-3), SQUARES, KEY, SUM),
        (optax.sm3(1e-3, momentum=0.0), BF16, None, SUM),
        (optax.contrib.schedule_free_sgd(1e-3), Z, None, COPY),
        (ADAM, {"n": BF16}, None, "has no field 'n'. Its fields: count, mu, nu"),
        (optax.sgd(1e-3), BF16, None, "has no first moment. Its fields: none"),
        (ADAM, "int16", None, "should be bfloat16, float16, float32, 'int8' or 'float8', but got"),
        (ADAM, {"nu": "float16"}, None, "'nu' is float16, in which the square of 256 overflows"),
        (ADAM, "int8", None, r"'mu' is 8 bits, but its decay rate is 0\.9\. Above 0\.69"),
        (ADAM, {"nu": "int8"}, None, "'nu' is 8 bits, but its decay rate is 0.999"),
        (optax.adam(1e-3, b2=0.5), {"nu": "float8"}, None, "Above 0.38, rounding"),
        (optax.adan(1e-3), {"v": "int8"}, KEY, "'v' is 8 bits, which store a sign .* negative"),
        (optax.adagrad(1e-3), {"sum_of_squares": "int8"}, KEY, SUM),
    ],
)
def test_moments_that_cannot_be_narrow_are_refused_by_name(tx, moment_dtype, key, text):
    with pytest.raises(ValueError, match=text):
        wrapped(tx, moment_dtype=moment_dtype, key=key).init(PARAMS)


def test_fields_that_cannot_be_tried_are_first_moments_by_their_names():
    needs: Any = lambda updates, state, params=None, *, value: (updates, state)  # noqa: E731
    start: Any = lambda params: Named(*[jax.tree.map(jnp.zeros_like, params)] * 2)  # noqa: E731
    odd = optax.GradientTransformationExtraArgs(start, needs)
    with pytest.raises(ValueError, match="'nu' can't be checked: a trial step on params of one"):
        wrapped(odd, moment_dtype={"nu": BF16}).init(PARAMS)
    with pytest.raises(ValueError, match="'mu' can't be checked"):
        wrapped(odd, moment_dtype="int8").init(PARAMS)
    assert wrapped(odd, moment_dtype={"mu": BF16}).init(PARAMS).inner.mu["w"].dtype == jnp.bfloat16
