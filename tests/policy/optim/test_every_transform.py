"""Every transform of optax, in every pair of dtypes: types stay, masters are as in float32."""

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import apply_gradients, master_params
from tests.policy.optim.saving import FAST
from tests.policy.optim.steps import assert_same, stepped, types, wrapped

# by the parameter's name
NUMBERS: dict[str, Any] = {"clipping": 0.1, "decay": 0.9, "eta": 0.01, "gamma": 0.55}
NUMBERS |= {"l2_norm_clip": 1.0, "learning_rate": 0.01, "max_backtracking_steps": 3, "seed": 0}
NUMBERS |= {"max_consecutive_errors": 2, "max_delta": 0.1, "max_linesearch_steps": 3}
NUMBERS |= {"max_norm": 0.1, "noise_multiplier": 0.1, "slow_step_size": 0.5, "step_size": 0.01}
NUMBERS |= {"sync_period": 2, "threshold": 0.1, "measure_name": "measured"}
ARGUMENTS: dict[str, Callable[[], Any]] = {  # made anew for each transform
    "adv_optimizer": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "base_optimizer": lambda: optax.sgd(0.01),
    "f": lambda: lambda updates, params=None: updates,
    "fast_optimizer": lambda: optax.sgd(0.01),
    "freeze_mask": lambda: {"b": True, "w": False},
    "inner": lambda: optax.adam(0.01),
    "inner_factory": lambda: optax.adam,
    "mask": lambda: {"b": True, "w": False},
    "measure": lambda: lambda updates, *_, **__: updates,
    "optimizer": lambda: optax.sgd(0.01),
    "param_labels": lambda: {"b": "one", "w": "two"},
    "should_transform_fn": lambda: lambda step, **_: step < 2,
    "step_size_fn": lambda: lambda count: 0.01 * 0.5**count,
    "transforms": lambda: {"one": optax.adam(0.01), "two": optax.sgd(0.01)},
    "tx": lambda: optax.adam(0.01),
}


def muon() -> Any:
    """Its default takes a tree of one leaf only, and matrices."""
    numbers = lambda updates: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)  # noqa: E731
    inner = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
    return optax.masked(inner, {"b": False, "w": True})


SPECIAL: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(optax.clip(0.5), optax.adam(0.01)),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(0.01))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.01),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(0.01),
    "scale_by_muon": muon,
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: g * 0.5),
}
# their gradients have an axis more than the params
PER_EXAMPLE = ("differentially_private_aggregate", "dpsgd")
PAIRED = ("lookahead",)  # its params are a pair of the params, its gradients are not


def value_fn(params: Any, **_: Any) -> jax.Array:
    squares = (jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params))
    return sum(squares, jnp.float32(0))


LINE_SEARCH = ("value", "grad", "value_fn")
EXTRA: dict[str, tuple[str, ...]] = {"lbfgs": LINE_SEARCH, "sophia": ("obj_fn",)}
SEARCHES = ("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch")
EXTRA |= dict.fromkeys(SEARCHES, LINE_SEARCH)
VALUE = ("polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau")
EXTRA |= dict.fromkeys(VALUE, ("value",))


def extra_arguments(name: str, params: Any, gradients: Any) -> dict[str, Any]:
    """Returns arguments for line searches, Polyak's step, MoMo, Sophia and reduce_on_plateau."""
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    every = {"value": value_fn(params), "grad": wide, "value_fn": value_fn, "obj_fn": value_fn}
    return {key: every[key] for key in EXTRA.get(name, ())}


def found() -> dict[str, Callable[..., Any]]:
    """Returns names and factories: exports of optax and optax.contrib that return transforms."""
    factories: dict[str, Callable[..., Any]] = {}
    for module in (optax, optax.contrib):
        for name in sorted(dir(module)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                factory = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(factory):
                continue
            returned = str(inspect.signature(factory).return_annotation)
            if "Gradient" in returned or "Transform" in returned or name in SPECIAL:
                factories[name] = factory
    return factories


def make(name: str, factory: Callable[..., Any]) -> Any:
    """The transform; KeyError by name where a new parameter has no argument here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in SPECIAL:
            return SPECIAL[name]()
        parameters = inspect.signature(factory).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind in (*plain, p.KEYWORD_ONLY)
        ]
        return factory(
            **{name: NUMBERS[name] if name in NUMBERS else ARGUMENTS[name]() for name in needed}
        )


F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
PAIRS = [(F32, BF16), (BF16, BF16), (F32, F16), (F16, F16), (BF16, F32), (F16, F32)]
# one each, all of them in turn
FACTORIES = found()
RUN_PAIRS = {name: PAIRS[index % len(PAIRS)] for index, name in enumerate(FACTORIES)}
RNG = np.random.default_rng(0)
VALUES = {"b": RNG.normal(size=3), "w": RNG.normal(size=(2, 4))}
GRADIENTS = {name: RNG.normal(size=(3, *value.shape)) for name, value in VALUES.items()}
EXAMPLES = {name: RNG.normal(size=(3, 4, *value.shape)) for name, value in VALUES.items()}


def tree(values, dtype):
    return {name: jnp.asarray(value, dtype) for name, value in values.items()}


def params_for(name, dtype, values=VALUES) -> Any:
    params = tree(values, dtype)
    return optax.LookaheadParams.init_synced(params) if name in PAIRED else params


def gradients_for(name, dtype) -> Any:
    return tree(EXAMPLES if name in PER_EXAMPLE else GRADIENTS, dtype)


def step_of(name: str, tx: Any) -> Any:
    def step(params, state, gradients):
        wide = master_params(params, state)
        return stepped(tx, params, state, gradients, **extra_arguments(name, wide, gradients))

    return step


@pytest.mark.cases(fast=1, slow=5)
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


@pytest.mark.cases(fast=9, slow=12)
@pytest.mark.parametrize("name", FACTORIES)
def test_every_transform_takes_its_own_state_back(name):
    tx, again = (wrapped(make(name, FACTORIES[name])) for _ in range(2))
    params = params_for(name, F32)
    state = jax.eval_shape(tx.init, params)
    assert again.stepper.check_state(params, pickle.loads(pickle.dumps(state))) is True


LARGE = {"b": np.ones(3), "w": np.full((32, 160), 0.5)}
REJECTED = "moment_dtype matched nothing|is rejected: the field is a running sum"


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in PER_EXAMPLE])
def test_a_state_with_first_moments_in_8_bits_keeps_every_type(name):
    tx = wrapped(make(name, FACTORIES[name]), moment_dtype="int8", key=jax.random.key(0))
    params = params_for(name, F32, LARGE)
    try:
        state = jax.eval_shape(tx.init, params)
    except ValueError as error:  # it has no such moments
        assert re.search(REJECTED, str(error)), error
        return
    after = jax.eval_shape(step_of(name, tx), params, state, tree(LARGE, BF16))[1]
    assert types(after) == types(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.cases(fast=1, slow=6)
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


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_gradients_per_example_are_rejected_by_what_takes_none(name):
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, BF16)
    tx = wrapped(make(name, FACTORIES[name]))
    text = r"b\[3, 3\].* does not take gradients per example: average them over their first axis, "
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, tx.init(params), gradients)


@pytest.mark.slow
def test_one_clip_for_all_examples_is_rejected():
    params, gradients = tree(VALUES, F32), tree(GRADIENTS, F32)
    tx = wrapped(make("dpsgd", FACTORIES["dpsgd"]), clip_global_norm=1.0)
    text = "clip_global_norm clips one gradient, but these gradients are per example"
    with pytest.raises(ValueError, match=text):
        stepped(tx, params, tx.init(params), gradients)


@pytest.mark.slow
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


@pytest.mark.slow
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
