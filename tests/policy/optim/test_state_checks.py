"""A state that another transform, other options or params made is refused by one clear error."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy.grads.loss_scale import DynamicLossScale
from policy.optim import apply_gradients, convert, mixed_precision, resync
from policy.optim.transform_names import optimizer_name
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
    "sgd with momentum": (optax.sgd(0.1, momentum=0.9), r"chain\(trace\)"),
    "radam": (optax.radam(0.1), r"chain\(scale_by_radam\)"),
    "adagrad": (optax.adagrad(0.1), r"chain\(scale_by_rss\)"),
    "plain sgd": (optax.sgd(0.1), "chain"),
    "a chain around it": (
        optax.chain(optax.clip(1.0), optax.adam(0.1)),
        r"chain\(chain\(scale_by_adam\)\)",
    ),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 2), r"MultiSteps\(chain\(scale_by_adam\)\)"),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(0.1), r"wrapped_transform\(adam\)"),
}


@pytest.mark.parametrize(
    "copied", [lambda state: state, lambda state: pickle.loads(pickle.dumps(state))]
)
@pytest.mark.parametrize("name", OTHERS)
def test_another_transforms_state_is_refused_by_both_names(name, copied):
    tx, shown = OTHERS[name]
    refuses(
        wrapped(tx),
        copied(wrapped().init(PARAMS)),
        rf"made by chain\(scale_by_adam\), but tx is {shown}: use the",
    )
    refuses(
        wrapped(),
        copied(wrapped(tx).init(PARAMS)),
        rf"made by {shown}, but tx is chain\(scale_by_adam\): use the",
    )


def test_a_schedule_where_there_was_none_is_refused_by_the_leaves():
    scheduled = optax.adam(optax.constant_schedule(0.1))
    text = (
        r"made by .*, but tx is .*: use the transform that made it, "
        r".* missing in the state: 1/count; unexpected: none"
    )
    refuses(wrapped(scheduled), wrapped().init(PARAMS), text)
    refuses(
        wrapped(),
        wrapped(scheduled).init(PARAMS),
        r"missing in the state: none; unexpected: 1/count",
    )


def test_msgpack_refuses_another_transforms_state_of_the_same_tree():
    saved = serialization.to_bytes(wrapped().init(PARAMS))
    with pytest.raises(
        ValueError,
        match=r"It was made by chain\(scale_by_adam\), not chain\(scale_by_radam\)\. Restore",
    ):
        serialization.from_bytes(wrapped(optax.radam(0.1)).init(PARAMS), saved)


@pytest.mark.parametrize("name", found())
def test_every_transform_takes_its_own_state_back(name):
    tx, again = (wrapped(make(name, found()[name])) for _ in range(2))
    params = optax.LookaheadParams.init_synced(PARAMS) if name == "lookahead" else PARAMS
    state = jax.eval_shape(tx.init, params)
    assert again.stepper.check_state(params, pickle.loads(pickle.dumps(state))) is True


def test_the_name_of_a_transform_is_that_of_what_makes_its_state():
    names = {name: optimizer_name(make(name, factory)) for name, factory in found().items()}
    assert names["adam"] == "chain(scale_by_adam)"
    assert names["inject_hyperparams"] == "wrapped_transform(adam)"
    assert names["muon"].startswith(
        "partition(chain(scale_by_adam, add_decayed_weights), chain(scale_by_muon"
    )
    assert names["apply_if_finite"] == "apply_if_finite(chain(scale_by_adam))"
    assert all(
        name.isidentifier()
        for text in names.values()
        for name in text.replace("(", ",").replace(")", ",").replace(" ", "").split(",")
        if name
    )


NU = {"nu": "bfloat16"}
FAST = optax.adam(0.1, b2=0.9)


@pytest.mark.parametrize(
    ("before", "after"), [(None, NU), (NU, None), ("bfloat16", NU), ("f16", "bf16")]
)
def test_moments_of_another_dtype_are_refused_by_name_and_converted(before, after):
    saves, loads = wrapped(FAST, moment_dtype=before), wrapped(FAST, moment_dtype=after)
    _, state, _ = apply_gradients(saves, PARAMS, saves.init(PARAMS), GRADIENTS)
    text = (
        r"moments in other dtypes than moment_dtype=.* stores: "
        r"0/(mu|nu)/b is \w+ instead of \w+, .*migrates it"
    )
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
        r"params of other shapes: 0/mu/w is \(3, 2\) instead of \(2, 3\), 0/nu/w is",
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


def test_an_init_that_reads_values_is_compared_by_name_only():
    def init(params):
        return {"largest": jnp.float32(max(float(jnp.max(p)) for p in jax.tree.leaves(params)))}

    def update(updates, state, params=None):
        return updates, state

    tx, again = (wrapped(optax.GradientTransformation(init, update)) for _ in range(2))
    state = pickle.loads(pickle.dumps(tx.init(PARAMS)))
    assert apply_gradients(again, PARAMS, state, GRADIENTS)[2]
    refuses(wrapped(), state, r"made by test_an_init_.*, but tx is chain\(scale_by_adam\)")


@dataclasses.dataclass(frozen=True)
class Made:
    """A transform as an object, which holds another one that holds it."""

    tx: Any
    owner: list[Any] = dataclasses.field(default_factory=list)

    def init(self, params):
        return self.tx.init(params)

    def update(self, updates, state, params=None):
        return self.tx.update(updates, state, params)


def logged(tx):
    def init(params):
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


LABELS = {"b": "x", "w": "y"}
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            optax.partition({"x": ADAM, "y": SGD}, LABELS),
            optax.partition({"y": SGD, "x": ADAM}, LABELS),
        ),
        (
            optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-0.1)),
            optax.chain(optax.scale_by_adam(), optax.identity(), optax.scale(-0.1)),
        ),
        (optax.adam(0.1), optax.adam(0.5, b1=0.5, nesterov=True)),
        (optax.adam(optax.constant_schedule(0.1)), optax.adam(optax.linear_schedule(0.1, 0, 5))),
        (optax.GradientTransformation(jax.jit(ADAM.init), jax.jit(ADAM.update)), ADAM),
    ],
    ids=["order of labels", "a part without a state", "hyperparameters", "schedules", "jitted"],
)
def test_the_same_transform_in_other_words_takes_the_state(one, other):
    state = pickle.loads(pickle.dumps(wrapped(one).init(PARAMS)))
    assert apply_gradients(wrapped(other), PARAMS, state, GRADIENTS)[2]


def test_a_renamed_transform_is_converted_with_its_moments():
    state = wrapped(ADAM).init(PARAMS)
    tx = wrapped(logged(ADAM))
    refuses(
        tx,
        state,
        r"but tx is logged\(chain\(scale_by_adam\)\): "
        r".* of the same optimizer, convert\(state, params, to=tx\) keeps",
    )
    assert apply_gradients(tx, PARAMS, convert(state, PARAMS, to=tx), GRADIENTS)[2]


def test_names_are_those_of_the_nearest_function_and_of_objects_that_hold_each_other():
    made = Made(ADAM)
    made.owner.append(made)
    assert optimizer_name(made) == "Made(chain(scale_by_adam))"
    assert optimizer_name(logged(ADAM)) == "logged(chain(scale_by_adam))"

    def main():
        def mine():
            return optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (g, s))  # pyright: ignore

        return mine()

    assert optimizer_name(main()) == "mine"


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


def test_optaxs_own_dtype_of_moments_is_converted():
    wide, narrow = wrapped(optax.adam(0.1)), wrapped(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    state = wide.init(PARAMS)
    refuses(
        narrow,
        state,
        "0/mu/b is float32 instead of bfloat16.* or Optax's own mu_dtype, that the state was",
    )
    made: Any = convert(state, PARAMS, to=narrow)
    assert made.inner[0].mu["w"].dtype == jnp.bfloat16
    assert apply_gradients(narrow, PARAMS, made, GRADIENTS)[2]


@pytest.mark.parametrize("change", ["resync", "convert"])
def test_stacked_states_stay_stacked(change):
    half = jax.tree.map(lambda p: jnp.stack([p.astype(jnp.bfloat16)] * 4), PARAMS)
    gradients = jax.tree.map(lambda g: jnp.stack([g] * 4), GRADIENTS)
    tx = wrapped()
    state = jax.vmap(tx.init)(half)
    state = resync(half, state) if change == "resync" else convert(state, half, to="auto")
    assert state.mode.shape == (4,)
    finite = jax.vmap(lambda p, s, g: apply_gradients(tx, p, s, g))(half, state, gradients)[2]
    assert finite.all()
