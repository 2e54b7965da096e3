"""Steps that are not compiled by the user: as many programs as optax's, and none anew."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import monitoring

from policy import ScaledGradients, apply_gradients, mixed_precision
from tests.policy.optim.steps import BOTH_WAYS, stepped

NAMES = ("sgd", "adam", "adamw", "lion", "rmsprop", "adagrad", "lamb", "lars", "novograd", "radam")
NAMES += ("yogi", "adabelief")
PARAMS = {"w": jnp.ones((5, 3), jnp.bfloat16), "b": jnp.ones(3)}
WIDE = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
GRADIENTS = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), PARAMS)
COMPILED = []


def _count(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration_secs)


monitoring.register_event_duration_secs_listener(_count)


def programs_of(wrap: Any, params: Any, through_optax: bool) -> int:
    """The number of programs that XLA compiles for two steps of each transform, from no cache."""
    jax.clear_caches()
    before = len(COMPILED)
    for name in NAMES:
        tx = wrap(getattr(optax, name)(1e-2))
        carried = params, tx.init(params)
        for _ in range(2):
            carried = stepped(tx, *carried, GRADIENTS, through_optax)
    return len(COMPILED) - before


@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_eager_steps_compile_no_more_programs_than_optax(through_optax):
    ours = programs_of(lambda tx: mixed_precision(tx, "bfloat16"), PARAMS, through_optax)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert ours <= programs_of(lambda tx: tx, WIDE, through_optax=True)


@pytest.mark.parametrize("scale", [None, 4.0, jnp.float32(4)])
@pytest.mark.parametrize("mode", ["remainder", "full", "none"])
def test_a_second_eager_step_compiles_nothing(mode, scale):
    adam = optax.inject_hyperparams(optax.adam)(1e-2)
    tx = mixed_precision(adam, "bfloat16", master_weights=mode)
    gradients = GRADIENTS if scale is None else ScaledGradients(GRADIENTS, scale)
    params, state, _ = apply_gradients(tx, PARAMS, tx.init(PARAMS), gradients)
    updates, state = tx.update(gradients, state, params)
    before = len(COMPILED)
    for rate in (0.1, 0.01):
        state = optax.tree_utils.tree_set(state, learning_rate=rate)
        params, state, _ = apply_gradients(tx, params, state, gradients)
        state = optax.tree_utils.tree_set(state, learning_rate=np.float32(rate))
        updates, state = tx.update(gradients, state, params)
    assert len(COMPILED) - before <= 1  # a Python number's conversion
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_programs_of_transforms_that_are_gone_are_let_go():
    def run():
        tx = mixed_precision(optax.adam(1e-2), "bfloat16")
        apply_gradients(tx, PARAMS, tx.init(PARAMS), GRADIENTS)

    def living():
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    run()
    before = living()
    for _ in range(5):
        run()
    assert living() <= before + 1


def test_an_inner_transform_that_takes_functions_is_stepped():
    params = {"w": jnp.ones(3)}
    tx = mixed_precision(optax.lbfgs(), "float32")
    value_fn = lambda p: jnp.sum(jnp.square(p["w"]))  # noqa: E731
    value, gradients = jax.value_and_grad(value_fn)(params)
    arguments = {"value": value, "grad": gradients, "value_fn": value_fn}
    new, _, finite = apply_gradients(tx, params, tx.init(params), gradients, **arguments)
    assert finite
    assert value_fn(new) < value


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5)])
def test_an_inner_transform_may_branch_on_numbers_that_it_is_given(value):
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return (updates if extra_args["value"] < 1 else params), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, params = mixed_precision(inner, "float32"), jnp.ones(3)
    new, _ = stepped(tx, params, tx.init(params), jnp.full(3, 0.5), value=value)
    np.testing.assert_array_equal(new, 1.5)
