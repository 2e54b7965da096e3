"""Optax's wrappers inside of `mixed_precision` and around it, in every way of stepping.

Inside, each moves the float32 weights as it would by hand in float32, with the skipped step left
out. Around it, each is rejected where the state is made, with the right order.
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
from policy import finite_of, loss_scale_of, master_params, mixed_precision
from policy.grads import ScaledGradients
from tests.policy.optim.saving import FAST
from tests.policy.optim.steps import stepped

RNG = np.random.default_rng(0)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=3), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=(2, 3)), jnp.bfloat16),
}
# bfloat16 numbers, so that plain and scaled gradients are the same; the second step is skipped
GRADIENTS = [
    {n: jnp.float32(jnp.bfloat16(RNG.normal(size=p.shape))) for n, p in PARAMS.items()}
    for _ in range(6)
]
GRADIENTS[1]["w"] = GRADIENTS[1]["w"].at[0, 0].set(jnp.nan)


def by_name(on: Any, off: Any) -> Any:
    """A mask or labels for a dict and for an nnx State."""
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: on if "w" in jax.tree_util.keystr(path) else off, tree
    )


def labeled(tx: Any, function: Any) -> Any:
    return function({"fast": tx, "slow": optax.sgd(0.125)}, by_name("fast", "slow"))


# each around a transform that it is given, which is ours in the rejected order
WRAPPERS: dict[str, Any] = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, by_name(True, False)),
    "multi_transform": lambda tx: labeled(tx, optax.multi_transform),
    "partition": lambda tx: labeled(tx, optax.partition),
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


class Trees:
    """A way to train: what is carried from step to step, a step, and its params and state."""

    through_optax = False

    def start(self, tx: Any) -> Any:
        return PARAMS, tx.init(PARAMS)

    def step(self, tx: Any, carried: Any, gradients: Any) -> Any:
        return stepped(tx, *carried, gradients, self.through_optax)

    def read(self, carried: Any) -> Any:
        return carried


class ThroughOptax(Trees):
    through_optax = True


class InTrainState(Trees):
    def step(self, tx: Any, carried: Any, gradients: Any) -> Any:
        state: Any = TrainState(0, lambda: None, carried[0], tx, carried[1])
        with jax.numpy_dtype_promotion("standard"):
            state = state.apply_gradients(grads=gradients)
        return state.params, state.opt_state


class Net(nnx.Module):
    def __init__(self) -> None:
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(value))


class InOptimizer(Trees):
    optimizer: Any = nnx.Optimizer

    def start(self, tx: Any) -> Any:
        model = Net()
        return flax_nnx.split((model, self.optimizer(model, tx, wrt=nnx.Param)))

    def step(self, tx: Any, carried: Any, gradients: Any) -> Any:
        model, optimizer = flax_nnx.merge(*carried)
        is_scaled = isinstance(gradients, ScaledGradients)
        structure = jax.tree.structure(nnx.state(model, nnx.Param))
        tree = structure.unflatten(jax.tree.leaves(gradients.tree if is_scaled else gradients))
        with jax.numpy_dtype_promotion("standard"):  # Flax's adds updates to half params
            optimizer.update(model, gradients.with_tree(tree) if is_scaled else tree)
        return flax_nnx.split((model, optimizer))

    def read(self, carried: Any) -> Any:
        model, optimizer = flax_nnx.merge(*carried)
        return flax_nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))


class InFlaxsOptimizer(InOptimizer):
    optimizer = flax_nnx.Optimizer


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


WAYS: list[Any] = [Trees, ThroughOptax, InTrainState, InOptimizer, InFlaxsOptimizer]
KINDS = ("plain", "plain, loss scale", "scaled, loss scale")
# Flax's own optimizer takes no scaled ones: rejected below
CASES = [(way, kind) for way in WAYS for kind in KINDS][:-1]


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_inside_it_moves_the_weights_as_by_hand_in_float32(wrapper, way, kind):
    (inner, expected), training = wrapper, way()
    loss_scale = "dynamic" if "loss scale" in kind else None
    tx = mixed_precision(inner, "mixed_bfloat16", loss_scale=loss_scale)

    @jax.jit
    def step(carried: Any, gradients: Any) -> Any:
        if kind.startswith("scaled"):
            scale = loss_scale_of(training.read(carried)[1]).loss_scale
            scaled = jax.tree.map(lambda g: (g * scale).astype(jnp.bfloat16), gradients)
            gradients = ScaledGradients(scaled, scale)
        carried = training.step(tx, carried, gradients)
        return carried, finite_of(training.read(carried)[1])

    carried, flags = training.start(tx), []
    compiled = step.lower(carried, GRADIENTS[0]).compile(compiler_options=FAST)
    for gradients in GRADIENTS:
        carried, finite = compiled(carried, gradients)
        flags.append(bool(finite))
    params, state = training.read(carried)
    assert flags == [True, False, *[True] * (len(GRADIENTS) - 2)]
    assert state.skipped == 1
    if loss_scale:
        assert loss_scale_of(state).loss_scale == 2.0**14
    masters = master_params(params, state)
    for name, weights in expected.items():
        # the same operations in other programs: a few ulps of float32
        np.testing.assert_allclose(masters[name], weights, rtol=2e-6, atol=1e-7)
        assert params[name].dtype == PARAMS[name].dtype
        assert not np.array_equal(weights, PARAMS[name].astype(jnp.float32))


@pytest.mark.parametrize("way", [Trees, InOptimizer])
@pytest.mark.parametrize("name", WRAPPERS)
def test_around_it_each_is_rejected_with_the_right_order(name, way):
    wrapped = WRAPPERS[name](mixed_precision(optax.adam(0.0625), "mixed_bfloat16"))
    told = NAMES.get(name, name)
    order = rf"inside optax's {told}, .* Put it outermost: mixed_precision\(optax\.{told}\("
    with pytest.raises(TypeError, match=order), jax.numpy_dtype_promotion("standard"):
        way().start(wrapped)


@pytest.mark.slow
def test_flaxs_optimizer_rejects_scaled_gradients_by_the_name_of_ours():
    tx, training = mixed_precision(optax.adam(0.1), "mixed_bfloat16"), InFlaxsOptimizer()
    with pytest.raises(ValueError, match=r"use mpmodules\.nnx\.Optimizer"):
        training.step(tx, training.start(tx), ScaledGradients(GRADIENTS[0], 8.0))


@pytest.mark.slow
def test_only_callers_that_are_transforms_count():
    tx: Any = mixed_precision(optax.adam(0.1), "mixed_bfloat16")
    state = tx.init(PARAMS)
    optax.tree_map_params(tx, lambda x: x, state)  # asks for a state to learn where the params are
    jax.eval_shape(jax.jit(tx.init), PARAMS)
