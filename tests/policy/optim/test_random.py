"""Random trainings: transforms, storage modes, options and faults in any order, from one seed.

The suite runs a few. ``python -m tests.random_faults`` runs many, and prints the seed that
repeats them.
"""

import pickle
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import strategies

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale, loss_scale_of, master_params
from policy.grads import ScaledGradients
from policy.optim import convert, resync
from policy.optim.storage_modes import round_to
from tests.policy.optim.steps import RANDOM, assert_same, stepped, unchanged, wrapped

pytestmark = pytest.mark.random

TRANSFORMS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.05, b2=0.95),
    "sgd": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.05, momentum=0.9),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.05),
    "adafactor": lambda: optax.adafactor(0.05),
}
MODES = {"float32": ["auto"], "float16": ["auto", "full", "none"]}
MODES["bfloat16"] = [*MODES["float16"], "remainder", *RANDOM]
FAULTS = (np.nan, np.inf, -np.inf, 1e20, -3e38)


@strategies.composite
def trainings(draw: Any) -> dict[str, Any]:
    """Draws a training: two params' dtypes, and the options of `mixed_precision`."""
    one_of = lambda values: draw(strategies.sampled_from(values))  # noqa: E731
    dtype = one_of(sorted(MODES))
    return {
        "dtypes": [dtype, one_of(["float32", dtype])],
        "transform": one_of(sorted(TRANSFORMS)),
        "mode": one_of(MODES[dtype]),
        "loss_scale": one_of([None, 8.0, "dynamic"]),
        "clip_global_norm": one_of([None, 1.0]),
        "through_optax": draw(strategies.booleans()),
    }


ACTIONS = strategies.lists(
    strategies.one_of(
        strategies.just(("step",)),
        strategies.tuples(
            strategies.just("fault"),
            strategies.integers(0, 1),
            strategies.integers(0, 5),
            strategies.sampled_from(FAULTS),
        ),
        strategies.sampled_from([("pickle",), ("bytes",), ("write",), ("foreign",)]),
        strategies.tuples(strategies.just("convert"), strategies.integers(0, 5)),
    ),
    min_size=6,
    max_size=16,
)


class Training:
    """Params and a state under one `mixed_precision`, and the invariants after each action."""

    def __init__(self, training: dict[str, Any]):
        self.training, self.steps, self.faults = training, 0, 0
        self.params = {
            name: jnp.asarray(np.linspace(-1, 2, 6).reshape(2, 3) + i, dtype)
            for i, (name, dtype) in enumerate(zip("ab", training["dtypes"], strict=True))
        }
        self.use(training["mode"])
        self.state = self.tx.init(self.params)

    def use(self, mode: Any) -> None:
        options = {"clip_global_norm": self.training["clip_global_norm"]}
        scale = self.training["loss_scale"]
        scale = DynamicLossScale(2.0**4, period=3) if scale == "dynamic" else scale
        inner = TRANSFORMS[self.training["transform"]]()
        self.mode = mode
        self.tx = wrapped(inner, mode=mode, loss_scale=scale, **options)
        self.compiled = jax.jit(self._step)

    def _step(self, params: Any, state: Any, gradients: Any) -> Any:
        scale = jnp.asarray(loss_scale_of(state).loss_scale, jnp.float32)
        scaled = ScaledGradients(jax.tree.map(lambda g: g * scale, gradients), scale)
        return stepped(self.tx, params, state, scaled, self.training["through_optax"])

    def gradients(self) -> Any:
        rng = np.random.default_rng(self.steps + self.faults)
        return {name: jnp.asarray(rng.normal(size=(2, 3)), jnp.float32) for name in self.params}

    def step(self) -> None:
        self.params, self.state = self.compiled(self.params, self.state, self.gradients())
        assert self.state.finite
        self.steps += 1

    def fault(self, leaf: int, position: int, value: float) -> None:
        gradients, name = self.gradients(), "ab"[leaf]
        gradients[name] = gradients[name].at[position // 3, position % 3].set(value)
        before = self.state
        new, self.state = self.compiled(self.params, self.state, gradients)
        assert not self.state.finite
        assert_same(unchanged(new, self.state), unchanged(self.params, before))
        self.faults += 1

    def pickle(self) -> None:
        self.params, self.state = pickle.loads(pickle.dumps((self.params, self.state)))

    def bytes(self) -> None:
        like = jax.tree.map(jnp.zeros_like, (self.params, self.state))
        found = serialization.from_bytes(like, serialization.to_bytes((self.params, self.state)))
        self.params, self.state = jax.tree.map(jnp.asarray, found)

    def write(self) -> None:
        self.params = {**self.params, "a": self.params["a"].at[0, 0].set(0.75)}
        self.state = resync(self.params, self.state)
        assert master_params(self.params, self.state)["a"][0, 0] == 0.75

    def convert(self, number: int) -> None:
        modes = MODES[self.training["dtypes"][0]]
        before = master_params(self.params, self.state)
        self.use(modes[number % len(modes)])
        self.state = convert(self.state, self.params, to=self.tx)
        after = master_params(self.params, self.state)
        for name, wide in after.items():  # no worse than the params themselves
            apart = np.abs(np.float64(self.params[name]) - np.float64(before[name]))
            assert (np.abs(np.float64(wide) - np.float64(before[name])) <= apart + 1e-12).all()

    def foreign(self) -> None:
        if jnp.dtype(self.training["dtypes"][0]).itemsize == 4:
            return
        wrong = self.state._replace(mode=self.state.mode + 1)
        new, after = self.compiled(self.params, wrong, self.gradients())
        assert not after.finite
        assert_same((new, after.masters), (self.params, self.state.masters))
        with pytest.raises(ValueError, match="masters of another mode"):
            master_params(self.params, wrong)

    def check(self) -> None:
        wide = master_params(self.params, self.state)
        for name, dtype in zip("ab", self.training["dtypes"], strict=True):
            assert self.params[name].dtype == dtype
            assert np.isfinite(np.float64(self.params[name])).all()
            # optax's own addition may round one, until the next step
            missed = round_to(wide[name], self.params[name].dtype) != self.params[name]
            assert np.sum(np.asarray(missed)) <= self.training["through_optax"]
        assert self.state.count == self.steps
        assert self.state.skipped == self.faults


@pytest.mark.slow
@hypothesis.given(training=trainings(), actions=ACTIONS)
def test_a_random_training_loses_nothing(training, actions):
    run = Training(training)
    for name, *arguments in actions:
        getattr(run, name)(*arguments)
        run.check()
