"""Optax's wrappers inside of `mixed_precision` and around it, in every way of stepping.

Inside, each moves the float32 weights as it would by hand in float32, with the skipped step left
out. Around it, each
is refused where the state is made, with the right order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from flax.training.train_state import TrainState

from mpmodules import nnx
from policy import ScaledGradients, apply_gradients, loss_scale_of, master_params, mixed_precision
from policy.optim import finite_of
from tests.policy.optim.saving import FAST

RNG = np.random.default_rng(0)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=3), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(2, 3)), jnp.bfloat16),
}
# bfloat16 numbers, so that plain and scaled gradients are the same; the second step is skipped
GRADIENTS = [
    jax.tree.map(
        lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.bfloat16).astype(jnp.float32), PARAMS
    )
    for _ in range(6)
]
GRADIENTS[1]["w"] = GRADIENTS[1]["w"].at[0, 0].set(jnp.nan)


def by_name(on: Any, off: Any) -> Any:
    """A mask or labels for a dict and for an nnx State."""
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: on if "w" in jax.tree_util.keystr(path) else off, tree
    )


def labelled(tx: Any, function: Any) -> Any:
    return function({"fast": tx, "slow": optax.sgd(0.125)}, by_name("fast", "slow"))


# each around a transform that it is given, which is ours in the refused order
WRAPPERS: dict[str, Any] = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, by_name(True, False)),
    "multi_transform": lambda tx: labelled(tx, optax.multi_transform),
    "partition": lambda tx: labelled(tx, optax.partition),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "MultiSteps' transform": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(1.5),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "flatten": lambda tx: optax.flatten(tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(0.5)), ("step", tx)),
}
NAMES = {"MultiSteps' transform": "MultiSteps", "multi_transform": "partition"}


class Dict:
    """The ways to step a dict of params: each holds params and state, and steps once."""

    def __init__(self, tx: Any):
        self.tx, self.params, self.state = tx, PARAMS, tx.init(PARAMS)

    @property
    def carried(self) -> Any:
        return self.params, self.state

    @carried.setter
    def carried(self, carried: Any) -> None:
        self.params, self.state = carried


class Update(Dict):
    def step(self, gradients: Any) -> None:
        updates, self.state = self.tx.update(gradients, self.state, self.params)
        with jax.numpy_dtype_promotion("standard"):
            self.params = optax.apply_updates(self.params, updates)


class Apply(Dict):
    def step(self, gradients: Any) -> None:
        self.params, self.state, _ = apply_gradients(self.tx, self.params, self.state, gradients)


class Train(Dict):
    def step(self, gradients: Any) -> None:
        held: Any = TrainState(
            step=0, apply_fn=lambda: None, params=self.params, tx=self.tx, opt_state=self.state
        )
        with jax.numpy_dtype_promotion("standard"):
            held = held.apply_gradients(grads=gradients)
        self.params, self.state = held.params, held.opt_state


class Net(nnx.Module):
    def __init__(self) -> None:
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(value))


class Optimizer:
    optimizer_class: Any = nnx.Optimizer

    def __init__(self, tx: Any):
        model = Net()
        self.split = flax_nnx.split((model, self.optimizer_class(model, tx, wrt=nnx.Param)))

    @property
    def carried(self) -> Any:
        return self.split[1]

    @carried.setter
    def carried(self, carried: Any) -> None:
        self.split = self.split[0], carried

    @property
    def merged(self) -> Any:
        return flax_nnx.merge(*self.split)

    @property
    def params(self) -> Any:
        return flax_nnx.as_pure(nnx.state(self.merged[0], nnx.Param))

    @property
    def state(self) -> Any:
        return flax_nnx.as_pure(self.merged[1].opt_state)

    def step(self, gradients: Any) -> None:
        model, optimizer = self.merged
        scaled = isinstance(gradients, ScaledGradients)
        structure = jax.tree.structure(nnx.state(model, nnx.Param))
        tree = structure.unflatten(jax.tree.leaves(gradients.tree if scaled else gradients))
        optimizer.update(model, gradients.with_tree(tree) if scaled else tree)
        self.split = flax_nnx.split((model, optimizer))


class FlaxsOptimizer(Optimizer):
    optimizer_class = flax_nnx.Optimizer

    def step(self, gradients: Any) -> None:
        with jax.numpy_dtype_promotion("standard"):
            super().step(gradients)


ENTRIES: dict[str, Any] = {
    "tx.update": Update,
    "apply_gradients": Apply,
    "TrainState": Train,
    "nnx.Optimizer": Optimizer,
    "flax.nnx.Optimizer": FlaxsOptimizer,
}


def by_hand(inner: Any) -> Any:
    """The weights in float32, by the transform alone, without the step that is skipped."""
    weights = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    state = inner.init(weights)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step = jax.jit(inner.update)
        for gradients in (*GRADIENTS[:1], *GRADIENTS[2:]):
            updates, state = step(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
    return weights


@pytest.fixture(
    scope="module", params=sorted(set(WRAPPERS) - {"MultiSteps' transform", "named_chain"})
)
def wrapper(request):
    inner = WRAPPERS[request.param](optax.adam(0.0625))
    return inner, by_hand(inner)


KINDS = ("plain", "plain, loss scale", "scaled, loss scale")
# Flax's own optimizer takes no scaled ones: refused below
CASES = [
    (entry, kind)
    for entry in ENTRIES
    for kind in KINDS
    if (entry, kind) != ("flax.nnx.Optimizer", KINDS[2])
]


@pytest.mark.parametrize(("entry", "kind"), CASES)
def test_inside_it_moves_the_weights_as_by_hand_in_float32(wrapper, entry, kind):
    inner, expected = wrapper
    tx = mixed_precision(
        inner, "mixed_bfloat16", loss_scale="dynamic" if "loss scale" in kind else None
    )
    taken = ENTRIES[entry](tx)

    @jax.jit
    def step(carried: Any, gradients: Any) -> Any:
        taken.carried = carried
        if kind.startswith("scaled"):
            scale = loss_scale_of(taken.state).loss_scale
            scaled = jax.tree.map(lambda g: (g * scale).astype(jnp.bfloat16), gradients)
            gradients = ScaledGradients(scaled, scale)
        taken.step(gradients)
        return taken.carried, finite_of(taken.state)

    carried, flags = taken.carried, []
    compiled = step.lower(carried, GRADIENTS[0]).compile(compiler_options=FAST)
    for gradients in GRADIENTS:
        carried, finite = compiled(carried, gradients)
        flags.append(bool(finite))
    taken.carried = carried
    assert flags == [True, False, *[True] * (len(GRADIENTS) - 2)]
    assert taken.state.skipped == 1
    if "loss scale" in kind:
        assert loss_scale_of(taken.state).loss_scale == 2.0**14
    masters = master_params(taken.params, taken.state)
    for (
        name,
        weights,
    ) in expected.items():  # the same operations in other programs: a few ulps of float32
        np.testing.assert_allclose(masters[name], weights, rtol=2e-6, atol=1e-7)
        assert taken.params[name].dtype == PARAMS[name].dtype
        assert not np.array_equal(weights, PARAMS[name].astype(jnp.float32))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_around_it_each_is_refused_with_the_right_order(name, entry):
    wrapped = WRAPPERS[name](mixed_precision(optax.adam(0.0625), "mixed_bfloat16"))
    told = NAMES.get(name, name)
    order = rf"inside optax's {told}, .* Put it outermost: mixed_precision\(optax\.{told}\("
    with pytest.raises(TypeError, match=order), jax.numpy_dtype_promotion("standard"):
        ENTRIES[entry](wrapped)


def test_flaxs_optimizer_refuses_scaled_gradients_by_the_name_of_ours():
    taken = FlaxsOptimizer(mixed_precision(optax.adam(0.1), "mixed_bfloat16"))
    with pytest.raises(ValueError, match=r"use mpmodules\.nnx\.Optimizer"):
        taken.step(ScaledGradients(GRADIENTS[0], 8.0))


def test_only_callers_that_are_transforms_count():
    tx: Any = mixed_precision(optax.adam(0.1), "mixed_bfloat16")
    state = tx.init(PARAMS)
    optax.tree_map_params(tx, lambda x: x, state)  # asks for a state to learn where the params are
    jax.eval_shape(jax.jit(tx.init), PARAMS)
