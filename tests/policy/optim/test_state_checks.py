"""A state that is saved, copied or sent comes back whole; one that another transform, other options
or params made is rejected by one clear error.
"""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale, loss_scale_of
from policy.optim import convert, resync
from tests.eight_devices import run_python
from tests.policy.optim import saving
from tests.policy.optim.steps import BOTH_WAYS, assert_same, bits, dtypes, stepped, wrapped

PARAMS = {"b": jnp.ones(3), "w": jnp.full((2, 3), 0.5)}
GRADIENTS = jax.tree.map(jnp.ones_like, PARAMS)


def rejects(tx, state, text, params=PARAMS, gradients=GRADIENTS):
    """A step of either kind, traced or not, ends with a ValueError of that text."""
    calls = [functools.partial(stepped, tx, through_optax=way) for way in BOTH_WAYS]
    for call in (*calls, jax.jit(calls[0])):
        with pytest.raises(ValueError, match=text):
            call(params, state, gradients)


def pickled(tree):
    return pickle.loads(pickle.dumps(tree))


OTHERS = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "plain sgd": optax.sgd(0.1),
    "a chain around it": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
    "a schedule": optax.adam(optax.constant_schedule(0.1)),
}


@pytest.mark.cases(fast=7)
@pytest.mark.parametrize("copied", [lambda state: state, pickled])
@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_a_transform_with_another_state_is_rejected_by_its_leaves(name, copied):
    tx, text = OTHERS[name], r"made by another transform than tx: .* Missing: .*\. Unexpected: "
    rejects(wrapped(tx), copied(wrapped().init(PARAMS)), text)
    rejects(wrapped(), copied(wrapped(tx).init(PARAMS)), text)


FAST, IN_OPTAX = optax.adam(0.1, b2=0.9), optax.adam(0.1, b2=0.9, mu_dtype=jnp.bfloat16)
NARROW: Any = {"moment_dtype": {"nu": "bfloat16"}}


@pytest.mark.cases(fast=1)
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
def test_moments_of_another_dtype_are_rejected_by_name_and_converted(saves, loads):
    _, state = stepped(saves, PARAMS, saves.init(PARAMS), GRADIENTS)
    text = r"other arrays than tx .*: 0/(mu|nu)/b is \w+\[3\] instead of .*mu_dtype.*migrates"
    rejects(loads, state, text)
    made = convert(state, PARAMS, to=loads)
    assert dtypes(made) == dtypes(loads.init(PARAMS))
    for new, was in zip(jax.tree.leaves(made.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_allclose(np.float64(new), np.float64(was), rtol=2.0**-8)
    assert stepped(loads, PARAMS, made, GRADIENTS)[1].finite


def test_a_second_moment_that_was_stored_in_half_decays_again_after_convert():
    narrow, slow = optax.scale_by_rms(decay=0.9), wrapped(optax.scale_by_rms(decay=0.999))
    narrow = wrapped(narrow, **NARROW)
    _, state = stepped(narrow, PARAMS, narrow.init(PARAMS), GRADIENTS)
    state: Any = convert(state, PARAMS, to=slow)
    start, zero = float(state.inner.nu["b"][0]), jax.tree.map(jnp.zeros_like, PARAMS)
    step = jax.jit(lambda s: stepped(slow, PARAMS, s, zero)[1])
    for _ in range(100):
        state = step(state)
    np.testing.assert_allclose(state.inner.nu["b"], start * 0.999**100, rtol=1e-4)


def test_a_state_for_params_of_other_shapes_is_rejected_by_name():
    other = wrapped().init({**PARAMS, "w": jnp.ones((3, 2))})
    text = r"these params: 0/mu/w is float32\[3, 2\] instead of float32\[2, 3\], 0/nu/w is"
    rejects(wrapped(), other, text)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("saved", "of_tx"), [(None, "dynamic"), ("dynamic", None), (8.0, "dynamic"), (None, 8.0)]
)
def test_another_kind_of_loss_scale_is_rejected_by_name_and_converted(saved, of_tx):
    state, tx = wrapped(loss_scale=saved).init(PARAMS), wrapped(loss_scale=of_tx)
    kind = "(NoOp|Static|Dynamic)LossScale"
    rejects(tx, state, f"state has a {kind}, but tx was made with a {kind}")
    made = convert(state, PARAMS, to=tx)
    assert jax.tree.structure(made) == jax.tree.structure(tx.init(PARAMS))
    assert stepped(tx, PARAMS, made, GRADIENTS)[1].finite


def test_what_a_user_may_set_in_a_state_is_taken():
    tx = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), loss_scale="dynamic")
    state = tx.init(PARAMS)
    changed = optax.tree_utils.tree_set(state, learning_rate=1e-3)
    changed = changed._replace(loss_scale=DynamicLossScale(4.0, period=5))
    after = jax.jit(lambda s: stepped(tx, PARAMS, s, GRADIENTS)[1])(changed)
    assert after.finite
    assert after.loss_scale.period == 5


def test_a_state_of_an_init_that_reads_values_is_taken_as_it_is():
    def init(params):
        return {"largest": jnp.float32(max(float(jnp.max(p)) for p in jax.tree.leaves(params)))}

    same = lambda updates, state, params=None: (updates, state)  # noqa: E731
    tx, again = (wrapped(optax.GradientTransformation(init, same)) for _ in range(2))
    state = pickle.loads(pickle.dumps(tx.init(PARAMS)))
    assert stepped(again, PARAMS, state, GRADIENTS)[1].finite


def test_a_transform_takes_its_state_back_though_init_ran_again():
    calls: list[Any] = []

    def init(params: Any) -> Any:
        calls.append(optax.MaskedNode)
        return jax.tree_util.Partial(lambda: len(calls), jax.tree.map(jnp.zeros_like, params))

    same = lambda updates, state, params=None: (updates, state)  # noqa: E731
    tx = wrapped(optax.GradientTransformation(init, same))
    state = tx.init(PARAMS)
    jax.eval_shape(tx.init, PARAMS)
    assert stepped(tx, PARAMS, state, GRADIENTS)[1].finite


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("rate", [0.05, np.float64(0.05), jnp.bfloat16(0.05), 1])
@pytest.mark.parametrize("params", [jnp.ones(3), {"learning_rate": jnp.ones(2)}])
def test_hyperparameters_are_no_moments(params, rate):
    tx = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    state: Any = tx.init(params)
    hyperparams = {**state.inner.hyperparams, "learning_rate": rate}
    state = state._replace(inner=state.inner._replace(hyperparams=hyperparams))
    for each in (state, convert(state, params, to=tx)):
        assert stepped(tx, params, each, params)[1].finite


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("change", ["resync", "convert"])
def test_stacked_states_stay_stacked(change):
    half = jax.tree.map(lambda p: jnp.stack([p.astype(jnp.bfloat16)] * 4), PARAMS)
    gradients = jax.tree.map(lambda g: jnp.stack([g] * 4), GRADIENTS)
    tx = wrapped()
    state = jax.vmap(tx.init)(half)
    state = resync(half, state) if change == "resync" else convert(state, half, to=tx)
    assert state.mode.shape == (4,)
    after = jax.vmap(lambda p, s, g: stepped(tx, p, s, g)[1])(half, state, gradients)
    assert after.finite.all()


@pytest.fixture(scope="module")
def halfway():
    return saving.run(saving.start(), 0, saving.SAVED)


@pytest.fixture(scope="module")
def restored(halfway, tmp_path_factory):
    """The folder in which a fresh process went on from both checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saving.save(halfway, folder)
    run_python("-W", "ignore", "-m", "tests.policy.optim.saving", str(folder))
    return folder


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", saving.KINDS)
def test_a_fresh_process_goes_on_bit_for_bit_in_every_storage_mode(halfway, restored, kind):
    for mode, (_, state) in halfway.items():
        scale: Any = loss_scale_of(state)
        assert 0 < scale.counter < scale.period, mode
        assert state.inner.mini_step == 1
        assert state.skipped == 1
    adam = halfway[saving.EIGHT_BITS][1].inner.inner_opt_state.inner_state[0]
    assert (adam.mu["a"].qvalue.dtype, adam.nu["a"].qvalue.dtype) == (jnp.int8, jnp.uint8)
    assert (restored / f"{kind}.txt").read_text() == saving.describe(halfway)
    expected = bits(saving.run(halfway, saving.SAVED, saving.STEPS))
    got = np.load(restored / f"{kind}.npz")
    assert_same([got[name] for name in got.files], expected)


def through_a_state_dict(tree):
    return serialization.from_state_dict(saving.start(), serialization.to_state_dict(tree))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy, through_a_state_dict])
def test_a_copy_is_equal_in_structure_dtypes_and_bits(halfway, copied):
    assert_same(copied(halfway), halfway)


def state_of(loss_scale, dtype=jnp.bfloat16):
    tx = wrapped(optax.sgd(0.1), "bfloat16", "full", loss_scale=loss_scale)
    return tx.init({"w": jnp.ones(2, dtype)})


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (("dynamic", jnp.float16), r"'full', params bfloat16, and can't .*='full', params float16"),
        (
            (DynamicLossScale(8.0, hysteresis=2),),
            "saved loss scale should have loss_scale, counter, hysteresis_left, but got",
        ),
        ((None,), r"loss scale has counter, loss_scale, but .* a NoOpLossScale, which has no such"),
    ],
)
def test_a_state_of_another_kind_is_rejected_by_name(target, text):
    saved = serialization.to_bytes(state_of("dynamic"))
    with pytest.raises(ValueError, match=text):
        serialization.from_bytes(state_of(*target), saved)
