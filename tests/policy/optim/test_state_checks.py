"""A state that another transform, other options or params made is refused by one clear error."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale, apply_gradients, mixed_precision
from policy.optim import convert, resync
from tests.policy.optim.transforms import found, make

PARAMS = {"b": jnp.ones(3), "w": jnp.full((2, 3), 0.5)}
GRADIENTS = jax.tree.map(jnp.ones_like, PARAMS)


def wrapped(tx: Any = None, **options: Any) -> Any:
    return mixed_precision(optax.adam(0.1) if tx is None else tx, "float32", **options)


def refuses(tx, state, text, params=PARAMS, gradients=GRADIENTS):
    """A step of either kind, traced or not, ends with a ValueError of that text."""
    for call in (
        lambda p, s, g: apply_gradients(tx, p, s, g),
        lambda p, s, g: tx.update(g, s, p),
        jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g)),
    ):
        with pytest.raises(ValueError, match=text):
            call(params, state, gradients)


OTHERS = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "plain sgd": optax.sgd(0.1),
    "a chain around it": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
    "a schedule": optax.adam(optax.constant_schedule(0.1)),
}


@pytest.mark.parametrize(
    "copied", [lambda state: state, lambda state: pickle.loads(pickle.dumps(state))]
)
@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_a_transform_with_another_state_is_refused_by_its_leaves(name, copied):
    tx, text = OTHERS[name], r"made by another transform than tx: .* Missing: .*\. Unexpected: "
    refuses(wrapped(tx), copied(wrapped().init(PARAMS)), text)
    refuses(wrapped(), copied(wrapped(tx).init(PARAMS)), text)


@pytest.mark.parametrize("name", found())
def test_every_transform_takes_its_own_state_back(name):
    tx, again = (wrapped(make(name, found()[name])) for _ in range(2))
    params = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    state = jax.eval_shape(tx.init, params)
    assert again.stepper.check_state(params, pickle.loads(pickle.dumps(state))) is True


NU = {"nu": "bfloat16"}
FAST = optax.adam(0.1, b2=0.9)


NARROW, IN_OPTAX = {"moment_dtype": NU}, optax.adam(0.1, b2=0.9, mu_dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (wrapped(FAST), wrapped(FAST, **NARROW)),
        (wrapped(FAST, **NARROW), wrapped(FAST)),
        (wrapped(FAST, moment_dtype="bfloat16"), wrapped(FAST, **NARROW)),
        (wrapped(FAST, moment_dtype="f16"), wrapped(FAST, moment_dtype="bf16")),
        (wrapped(FAST), wrapped(IN_OPTAX)),
    ],
)
def test_moments_of_another_dtype_are_refused_by_name_and_converted(saves, loads):
    _, state, _ = apply_gradients(saves, PARAMS, saves.init(PARAMS), GRADIENTS)
    text = r"other arrays than tx .*: 0/(mu|nu)/b is \w+\[3\] instead of .*mu_dtype.*migrates"
    refuses(loads, state, text)
    made = convert(state, PARAMS, to=loads)
    fresh = loads.init(PARAMS)
    assert jax.tree.map(lambda x: x.dtype, made) == jax.tree.map(lambda x: x.dtype, fresh)
    for found_, was in zip(jax.tree.leaves(made.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_allclose(np.float64(found_), np.float64(was), rtol=2.0**-8)
    assert apply_gradients(loads, PARAMS, made, GRADIENTS)[2]


def test_a_second_moment_that_was_stored_in_half_decays_again_after_convert():
    narrow = wrapped(optax.scale_by_rms(decay=0.9), moment_dtype={"nu": "bfloat16"})
    slow = wrapped(optax.scale_by_rms(decay=0.999))
    _, state, _ = apply_gradients(narrow, PARAMS, narrow.init(PARAMS), GRADIENTS)
    state: Any = convert(state, PARAMS, to=slow)
    start, zero = float(state.inner.nu["b"][0]), jax.tree.map(jnp.zeros_like, PARAMS)
    step = jax.jit(lambda s: apply_gradients(slow, PARAMS, s, zero)[1])
    for _ in range(100):
        state = step(state)
    np.testing.assert_allclose(state.inner.nu["b"], start * 0.999**100, rtol=1e-4)


def test_a_state_for_params_of_other_shapes_is_refused_by_name():
    other = {**PARAMS, "w": jnp.ones((3, 2))}
    refuses(
        wrapped(),
        wrapped().init(other),
        r"stores for these params: 0/mu/w is float32\[3, 2\] instead of float32\[2, 3\], 0/nu/w is",
    )


@pytest.mark.parametrize(
    ("saved", "of_tx"), [(None, "dynamic"), ("dynamic", None), (8.0, "dynamic"), (None, 8.0)]
)
def test_another_kind_of_loss_scale_is_refused_by_name_and_converted(saved, of_tx):
    state, tx = wrapped(loss_scale=saved).init(PARAMS), wrapped(loss_scale=of_tx)
    refuses(
        tx,
        state,
        r"state has a (NoOp|Static|Dynamic)LossScale, but tx was made with a (NoOp|Static|Dynamic)",
    )
    made = convert(state, PARAMS, to=tx)
    assert jax.tree.structure(made) == jax.tree.structure(tx.init(PARAMS))
    assert apply_gradients(tx, PARAMS, made, GRADIENTS)[2]


def test_what_a_user_may_set_in_a_state_is_taken():
    tx = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), loss_scale="dynamic")
    state = tx.init(PARAMS)
    changed = optax.tree_utils.tree_set(state, learning_rate=1e-3)
    changed = changed._replace(loss_scale=DynamicLossScale(4.0, period=5))
    _, after, finite = jax.jit(lambda s: apply_gradients(tx, PARAMS, s, GRADIENTS))(changed)
    assert finite
    assert after.loss_scale.period == 5


def test_a_state_of_an_init_that_reads_values_is_taken_as_it_is():
    def init(params):
        return {"largest": jnp.float32(max(float(jnp.max(p)) for p in jax.tree.leaves(params)))}

    def update(updates, state, params=None):
        return updates, state

    tx, again = (wrapped(optax.GradientTransformation(init, update)) for _ in range(2))
    state = pickle.loads(pickle.dumps(tx.init(PARAMS)))
    assert apply_gradients(again, PARAMS, state, GRADIENTS)[2]


def test_a_transform_takes_its_state_back_though_init_ran_again():
    calls: list[Any] = []

    def init(params: Any) -> Any:
        calls.append(optax.MaskedNode)
        return jax.tree_util.Partial(lambda: len(calls), jax.tree.map(jnp.zeros_like, params))

    tx = wrapped(
        optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    )
    state = tx.init(PARAMS)
    jax.eval_shape(tx.init, PARAMS)
    assert apply_gradients(tx, PARAMS, state, GRADIENTS)[2]


@pytest.mark.parametrize("rate", [0.05, np.float64(0.05), jnp.bfloat16(0.05), 1])
@pytest.mark.parametrize("params", [jnp.ones(3), {"learning_rate": jnp.ones(2)}])
def test_hyperparameters_are_no_moments(params, rate):
    tx = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    state: Any = tx.init(params)
    hyperparams = {**state.inner.hyperparams, "learning_rate": rate}
    state = state._replace(inner=state.inner._replace(hyperparams=hyperparams))
    assert apply_gradients(tx, params, state, params)[2]
    made = convert(state, params, to=tx)
    assert apply_gradients(tx, params, made, params)[2]


@pytest.mark.parametrize("change", ["resync", "convert"])
def test_stacked_states_stay_stacked(change):
    half = jax.tree.map(lambda p: jnp.stack([p.astype(jnp.bfloat16)] * 4), PARAMS)
    gradients = jax.tree.map(lambda g: jnp.stack([g] * 4), GRADIENTS)
    tx = wrapped()
    state = jax.vmap(tx.init)(half)
    state = resync(half, state) if change == "resync" else convert(state, half, to=tx)
    assert state.mode.shape == (4,)
    finite = jax.vmap(lambda p, s, g: apply_gradients(tx, p, s, g))(half, state, gradients)[2]
    assert finite.all()
