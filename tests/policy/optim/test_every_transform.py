"""Every transform of optax, in every pair of dtypes: types stay, masters are as in float32."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import apply_gradients, master_params, mixed_precision
from tests.policy.optim.transforms import PAIRED, PER_EXAMPLE, extra_arguments, found, make

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = [(F32, BF16), (BF16, BF16), (F32, F16), (F16, F16), (BF16, F32), (F16, F32)]
RUN_PAIRS = {
    name: PAIRS[index % len(PAIRS)] for index, name in enumerate(found())
}  # one each, all of them in turn
RNG = np.random.default_rng(0)
VALUES = {"b": RNG.normal(size=3), "w": RNG.normal(size=(2, 4))}
GRADIENTS = {name: RNG.normal(size=(3, *value.shape)) for name, value in VALUES.items()}
EXAMPLES = {name: RNG.normal(size=(3, 4, *value.shape)) for name, value in VALUES.items()}
FACTORIES = found()
FAST: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tree(values, dtype):
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def params_for(name, dtype) -> Any:
    params = tree(VALUES, dtype)
    return optax.LookaheadParams.init_synced(params) if name in PAIRED else params


def gradients_for(name, dtype) -> Any:
    """Of three steps."""
    return tree(EXAMPLES if name in PER_EXAMPLE else GRADIENTS, dtype)


def types(tree):
    return [(x.shape, str(x.dtype), x.weak_type) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_keeps_every_type_in_every_pair_of_dtypes(name):
    tx = mixed_precision(make(name, FACTORIES[name]), "float32", loss_scale="dynamic")

    def step(params, state, gradients):
        return apply_gradients(
            tx, params, state, gradients, **extra_arguments(name, params, gradients)
        )[:2]

    for params_dtype, gradient_dtype in PAIRS:
        params = params_for(name, params_dtype)
        gradients = jax.tree.map(lambda g: g[0], gradients_for(name, gradient_dtype))
        state = jax.eval_shape(tx.init, params)
        new, after = jax.eval_shape(step, params, state, gradients)
        assert types(after) == types(state)
        assert not any(weak for _, _, weak in types(state))
        assert types(new) == [(p.shape, str(p.dtype), False) for p in jax.tree.leaves(params)]


LARGE = {"b": np.ones(3), "w": np.full((32, 160), 0.5)}
REFUSED = "moment_dtype matched nothing|is refused: the field is a running sum"


def with_codes(name):
    """Returns a transform with first moments in 8 bits, params and state; None if it has none."""
    tx = mixed_precision(
        make(name, FACTORIES[name]), "float32", moment_dtype="int8", key=jax.random.key(0)
    )
    params: Any = tree(LARGE, F32)
    params = optax.LookaheadParams.init_synced(params) if name in PAIRED else params
    try:
        return tx, params, jax.eval_shape(tx.init, params)
    except ValueError as error:
        assert re.search(REFUSED, str(error)), error
        return None


@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in PER_EXAMPLE])
def test_a_state_with_first_moments_in_8_bits_keeps_every_type(name):
    made = with_codes(name)
    if made is None:
        return
    tx, params, state = made

    def step(params, state, gradients):
        extra = extra_arguments(name, params, gradients)
        return apply_gradients(tx, params, state, gradients, **extra)[:2]

    after = jax.eval_shape(step, params, state, tree(LARGE, BF16))[1]
    assert types(after) == types(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("name", FACTORIES)
def test_masters_move_as_in_an_all_float32_run(name):
    params_dtype, gradient_dtype = RUN_PAIRS[name]
    params, gradients = params_for(name, params_dtype), gradients_for(name, gradient_dtype)
    wide = jax.tree.map(lambda p: p.astype(F32), params)

    def ours(params, gradients):
        tx = mixed_precision(make(name, FACTORIES[name]), "float32")

        def step(carry, gradients):
            params, state = carry
            params, state, finite = apply_gradients(
                tx,
                params,
                state,
                gradients,
                **extra_arguments(name, master_params(params, state), gradients),
            )
            return (params, state), finite

        (params, state), finite = jax.lax.scan(step, (params, tx.init(params)), gradients)
        return params, master_params(params, state), finite

    def plain(params, gradients):
        tx = optax.with_extra_args_support(make(name, FACTORIES[name]))
        state = tx.init(params)
        for index in range(3):  # not a scan: some of optax's states change their weak types
            gradient = jax.tree.map(lambda g: g[index].astype(F32), gradients)  # noqa: B023
            updates, state = tx.update(
                gradient, state, params, **extra_arguments(name, params, gradient)
            )
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
    for stored, master, end, start in zip(
        *map(jax.tree.leaves, (new, masters, expected, wide)), strict=True
    ):
        assert stored.dtype == params_dtype
        assert jnp.isfinite(stored).all()
        moved = np.abs(np.asarray(end) - start).max()
        np.testing.assert_allclose(master, end, rtol=0, atol=0.01 * moved + 1e-6)


def private(name, seed) -> Any:
    if name == "dpsgd":
        with (
            warnings.catch_warnings()
        ):  # optax 0.2.8 deprecates the argument, and has no other here
            warnings.simplefilter("ignore", DeprecationWarning)
            return optax.contrib.dpsgd(0.01, 1.0, 0.1, seed)
    return optax.contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(seed))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_gradients_per_example_are_refused_by_what_takes_none(name):
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, BF16)
    tx = mixed_precision(make(name, FACTORIES[name]), "float32")
    text = r"b\[3, 3\].* does not take gradients per example: average them over their first axis, "
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, tx.init(params), gradients)


def test_one_clip_for_all_examples_is_refused():
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, F32)
    tx = mixed_precision(private("dpsgd", 0), "float32", clip_global_norm=1.0)
    with pytest.raises(
        ValueError, match="clip_global_norm clips one gradient, but these gradients are per example"
    ):
        apply_gradients(tx, params, tx.init(params), gradients)


def test_sam_takes_its_own_gradients_of_float32_params():
    params = tree(VALUES, BF16)
    seen: Any = []

    def gradient(params, _):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda p: p * 2, params)

    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam: Any = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)
    tx = mixed_precision(sam, "bfloat16")
    gradients = jax.tree.map(lambda p: p * 2, params)
    new, state, finite = apply_gradients(tx, params, tx.init(params), gradients, grad_fn=gradient)
    assert finite
    assert set(seen) == {jnp.dtype(F32)}
    for before, after in zip(
        jax.tree.leaves(params), jax.tree.leaves(master_params(new, state)), strict=True
    ):
        # one step of 0.1 on gradients taken 0.05 away at most
        np.testing.assert_allclose(
            after, 0.8 * np.asarray(before, np.float32), atol=0.2 * 0.05 + 1e-6
        )


def test_lookaheads_pair_is_stepped_and_skipped_as_one():
    pair = params_for("lookahead", BF16)
    overwritten = {"_overwrite_with_gradient": {"s": jnp.ones(2)}}
    pair = optax.LookaheadParams({**pair.fast, **overwritten}, {**pair.slow, **overwritten})
    tx = mixed_precision(
        optax.lookahead(optax.sgd(0.1), 2, 0.5), "bfloat16", clip_global_norm=100.0
    )
    gradients = {**tree(VALUES, F32), "_overwrite_with_gradient": {"s": jnp.full(2, 3.0)}}
    state: Any = tx.init(pair)
    new: Any = pair
    for _ in range(2):
        new, state, _ = apply_gradients(tx, new, state, gradients)
    jax.tree.map(np.testing.assert_array_equal, new.fast, new.slow)  # in step every second time
    np.testing.assert_array_equal(new.fast["_overwrite_with_gradient"]["s"], 3)
    gradients["w"] = gradients["w"] * np.nan
    skipped, _, finite = apply_gradients(tx, new, state, gradients)
    assert not finite
    jax.tree.map(np.testing.assert_array_equal, skipped, new)
