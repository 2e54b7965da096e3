"""Every transform of optax, in every pair of dtypes: types stay, masters are as in float32."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import apply_gradients, master_params
from tests.policy.optim.saving import FAST
from tests.policy.optim.steps import assert_same, stepped, types, wrapped
from tests.policy.optim.transforms import PAIRED, PER_EXAMPLE, extra_arguments, found, make

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = [(F32, BF16), (BF16, BF16), (F32, F16), (F16, F16), (BF16, F32), (F16, F32)]
# one each, all of them in turn
RUN_PAIRS = {name: PAIRS[index % len(PAIRS)] for index, name in enumerate(found())}
RNG = np.random.default_rng(0)
VALUES = {"b": RNG.normal(size=3), "w": RNG.normal(size=(2, 4))}
GRADIENTS = {name: RNG.normal(size=(3, *value.shape)) for name, value in VALUES.items()}
EXAMPLES = {name: RNG.normal(size=(3, 4, *value.shape)) for name, value in VALUES.items()}
FACTORIES = found()


def tree(values, dtype):
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def params_for(name, dtype) -> Any:
    params = tree(VALUES, dtype)
    return optax.LookaheadParams.init_synced(params) if name in PAIRED else params


def gradients_for(name, dtype) -> Any:
    """Of three steps."""
    return tree(EXAMPLES if name in PER_EXAMPLE else GRADIENTS, dtype)


def step_of(name: str, tx: Any) -> Any:
    """Returns a step with the arguments that the transform of that name asks for."""

    def step(params, state, gradients):
        wide = master_params(params, state)
        return stepped(tx, params, state, gradients, **extra_arguments(name, wide, gradients))

    return step


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_keeps_every_type_in_every_pair_of_dtypes(name):
    tx = wrapped(make(name, FACTORIES[name]), loss_scale="dynamic")
    for params_dtype, gradient_dtype in PAIRS:
        params = params_for(name, params_dtype)
        gradients = jax.tree.map(lambda g: g[0], gradients_for(name, gradient_dtype))
        state = jax.eval_shape(tx.init, params)
        new, after = jax.eval_shape(step_of(name, tx), params, state, gradients)
        assert types(after) == types(state)
        assert not any(weak for _, _, weak in types(state))
        assert types(new) == [(p.shape, str(p.dtype), False) for p in jax.tree.leaves(params)]


LARGE = {"b": np.ones(3), "w": np.full((32, 160), 0.5)}
REFUSED = "moment_dtype matched nothing|is refused: the field is a running sum"


@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in PER_EXAMPLE])
def test_a_state_with_first_moments_in_8_bits_keeps_every_type(name):
    tx = wrapped(make(name, FACTORIES[name]), moment_dtype="int8", key=jax.random.key(0))
    params: Any = tree(LARGE, F32)
    params = optax.LookaheadParams.init_synced(params) if name in PAIRED else params
    try:
        state = jax.eval_shape(tx.init, params)
    except ValueError as error:  # it has no such moments
        assert re.search(REFUSED, str(error)), error
        return
    after = jax.eval_shape(step_of(name, tx), params, state, tree(LARGE, BF16))[1]
    assert types(after) == types(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("name", FACTORIES)
def test_masters_move_as_in_an_all_float32_run(name):
    params_dtype, gradient_dtype = RUN_PAIRS[name]
    params, gradients = params_for(name, params_dtype), gradients_for(name, gradient_dtype)
    wide = jax.tree.map(lambda p: p.astype(F32), params)

    def ours(params, gradients):
        tx = wrapped(make(name, FACTORIES[name]))
        step = step_of(name, tx)

        def body(carry, gradients):
            params, state = step(*carry, gradients)
            return (params, state), state.finite

        (params, state), finite = jax.lax.scan(body, (params, tx.init(params)), gradients)
        return params, master_params(params, state), finite

    def plain(params, gradients):
        tx = optax.with_extra_args_support(make(name, FACTORIES[name]))
        state = tx.init(params)
        for index in range(3):  # not a scan: some of optax's states change their weak types
            gradient = jax.tree.map(lambda g: g[index].astype(F32), gradients)  # noqa: B023
            extra = extra_arguments(name, params, gradient)
            updates, state = tx.update(gradient, state, params, **extra)
            params = optax.apply_updates(params, updates)
        return params

    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("ignore")
        expected = jax.jit(plain, compiler_options=FAST)(wide, gradients)
    new, masters, finite = jax.jit(ours, compiler_options=FAST)(params, gradients)
    assert finite.all()
    assert len(jax.tree.leaves(new)) == len(jax.tree.leaves(params))
    leaves = map(jax.tree.leaves, (new, masters, expected, wide))
    for stored, master, end, start in zip(*leaves, strict=True):
        assert stored.dtype == params_dtype
        assert jnp.isfinite(stored).all()
        moved = np.abs(np.asarray(end) - start).max()
        np.testing.assert_allclose(master, end, rtol=0, atol=0.01 * moved + 1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_gradients_per_example_are_refused_by_what_takes_none(name):
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, BF16)
    tx = wrapped(make(name, FACTORIES[name]))
    text = r"b\[3, 3\].* does not take gradients per example: average them over their first axis, "
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, tx.init(params), gradients)


def test_one_clip_for_all_examples_is_refused():
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, F32)
    tx = wrapped(make("dpsgd", FACTORIES["dpsgd"]), clip_global_norm=1.0)
    text = "clip_global_norm clips one gradient, but these gradients are per example"
    with pytest.raises(ValueError, match=text):
        stepped(tx, params, tx.init(params), gradients)


def test_sam_takes_its_own_gradients_of_float32_params():
    params = tree(VALUES, BF16)
    seen: Any = []

    def gradient(params, _):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda p: p * 2, params)

    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam: Any = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)
    tx = wrapped(sam, "bfloat16")
    gradients = jax.tree.map(lambda p: p * 2, params)
    new, state = stepped(tx, params, tx.init(params), gradients, grad_fn=gradient)
    assert state.finite
    assert set(seen) == {jnp.dtype(F32)}
    for name, after in master_params(new, state).items():
        # one step of 0.1 on gradients taken 0.05 away at most
        expected = 0.8 * np.asarray(params[name], np.float32)
        np.testing.assert_allclose(after, expected, atol=0.2 * 0.05 + 1e-6)


def test_lookaheads_pair_is_stepped_and_skipped_as_one():
    pair = params_for("lookahead", BF16)
    overwritten = {"_overwrite_with_gradient": {"s": jnp.ones(2)}}
    pair = optax.LookaheadParams({**pair.fast, **overwritten}, {**pair.slow, **overwritten})
    tx = wrapped(optax.lookahead(optax.sgd(0.1), 2, 0.5), "bfloat16", clip_global_norm=100.0)
    gradients = {**tree(VALUES, F32), "_overwrite_with_gradient": {"s": jnp.full(2, 3.0)}}
    new: Any = pair
    state = tx.init(pair)
    for _ in range(2):
        new, state = stepped(tx, new, state, gradients)
    assert_same(new.fast, new.slow)  # in step every second time
    np.testing.assert_array_equal(new.fast["_overwrite_with_gradient"]["s"], 3)
    gradients["w"] = gradients["w"] * np.nan
    skipped, state = stepped(tx, new, state, gradients)
    assert not state.finite
    assert_same(skipped, new)
