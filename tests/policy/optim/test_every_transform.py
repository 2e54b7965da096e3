"""Every transform of optax, in every pair of dtypes: state types fixed, params keep theirs, masters as in float32."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy.optim import apply_gradients, master_params, mixed_precision
from tests.policy.optim.transforms import TAKES_OTHER_TREES, extra_arguments, found, make

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = [(F32, BF16), (BF16, BF16), (F32, F16), (F16, F16), (BF16, F32), (F16, F32)]
RUN_PAIRS = {name: PAIRS[index % len(PAIRS)] for index, name in enumerate(found())}  # one each, all of them in turn
RNG = np.random.default_rng(0)
VALUES = {"b": RNG.normal(size=3), "w": RNG.normal(size=(2, 4))}
GRADIENTS = {name: RNG.normal(size=(3, *value.shape)) for name, value in VALUES.items()}
FACTORIES = {name: factory for name, factory in found().items() if name not in TAKES_OTHER_TREES}
FAST: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tree(values, dtype):
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def types(tree):
    return [(x.shape, str(x.dtype), x.weak_type) for x in jax.tree.leaves(tree)]


def test_enough_is_found():
    assert len(found()) >= 120
    assert {"adamw", "scale_by_adam", "muon", "inject_hyperparams", "lbfgs"} <= set(found())


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_keeps_every_type_in_every_pair_of_dtypes(name):
    tx = mixed_precision(make(name, FACTORIES[name]), "float32", loss_scale="dynamic")

    def step(params, state, gradients):
        return apply_gradients(tx, params, state, gradients, **extra_arguments(name, params, gradients))[:2]

    for params_dtype, gradient_dtype in PAIRS:
        params, gradients = tree(VALUES, params_dtype), tree(VALUES, gradient_dtype)
        state = jax.eval_shape(tx.init, params)
        new, after = jax.eval_shape(step, params, state, gradients)
        assert types(after) == types(state)
        assert not any(weak for _, _, weak in types(state))
        assert types(new) == [(p.shape, str(p.dtype), False) for p in jax.tree.leaves(params)]


@pytest.mark.parametrize("name", FACTORIES)
def test_masters_move_as_in_an_all_float32_run(name):
    params_dtype, gradient_dtype = RUN_PAIRS[name]
    params, gradients = tree(VALUES, params_dtype), tree(GRADIENTS, gradient_dtype)
    wide = jax.tree.map(lambda p: p.astype(F32), params)

    def ours(params, gradients):
        tx = mixed_precision(make(name, FACTORIES[name]), "float32")

        def step(carry, gradients):
            params, state = carry
            params, state, finite = apply_gradients(
                tx, params, state, gradients, **extra_arguments(name, master_params(params, state), gradients)
            )
            return (params, state), finite

        (params, state), finite = jax.lax.scan(step, (params, tx.init(params)), gradients)
        return params, master_params(params, state), finite

    def plain(params, gradients):
        tx = optax.with_extra_args_support(make(name, FACTORIES[name]))
        state = tx.init(params)
        for index in range(3):  # not a scan: some of optax's states change their weak types
            gradient = jax.tree.map(lambda g: g[index].astype(F32), gradients)  # noqa: B023
            updates, state = tx.update(gradient, state, params, **extra_arguments(name, params, gradient))
            params = optax.apply_updates(params, updates)
        return params

    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        expected = jax.jit(plain, compiler_options=FAST)(wide, gradients)
    new, masters, finite = jax.jit(ours, compiler_options=FAST)(params, gradients)
    assert finite.all()
    for key, start in wide.items():
        assert new[key].dtype == params_dtype
        assert jnp.isfinite(new[key]).all()
        moved = np.abs(np.asarray(expected[key]) - start).max()
        np.testing.assert_allclose(masters[key], expected[key], rtol=0, atol=0.01 * moved + 1e-6)


@pytest.mark.parametrize("name", TAKES_OTHER_TREES)
def test_what_steps_other_trees_than_the_params_is_refused(name):
    tx = mixed_precision(make(name, found()[name]), "float32")
    params = tree(VALUES, F32)
    with pytest.raises((ValueError, TypeError)):
        apply_gradients(tx, params, tx.init(params), tree(GRADIENTS, F32))
