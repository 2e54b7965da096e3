"""A state used with another storage mode is rejected or migrated: no weight is misread."""

import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import apply_gradients, init_from_master, master_params
from policy.optim import convert, resync
from policy.optim.storage_modes import storage_code, storage_text
from tests.policy.optim.steps import BOTH_WAYS, MODES, assert_same, stepped, wrapped

PAIRS = [
    (dtype, a, b)
    for dtype in ("bfloat16", "float16")
    for a, b in itertools.permutations(MODES, 2)
    if dtype == "bfloat16" or "remainder" not in (a, b)
]
pairs = pytest.mark.parametrize(("dtype", "a", "b"), PAIRS)
WIDE = {"a": np.float32(3.14159), "w": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)}
BITS = {
    "bfloat16": {"full": 24, "none": 8},
    "float16": {"full": 24, "none": 11},
}
GRADIENTS = jax.tree.map(lambda x: jnp.full(np.shape(x), 0.5), WIDE)


@functools.cache
def transform(mode: str, dtype: str) -> Any:
    return wrapped(optax.sgd(0.0, momentum=0.9), dtype, mode)


@functools.cache
def start(mode: str, dtype: str) -> Any:
    return init_from_master(transform(mode, dtype), jax.tree.map(jnp.asarray, WIDE))


def bits_of(dtype: str, *modes: str) -> int:
    """Returns the fewest bits that modes keep: a remainder keeps those of a full master."""
    kinds = {"auto": "full", "remainder": "full", "stochastic": "none"}
    return min(BITS[dtype][kinds.get(mode, mode)] for mode in modes)


def is_same_storage(dtype: str, a: str, b: str) -> bool:
    stored = {"auto": "remainder" if dtype == "bfloat16" else "full", "stochastic": "none"}
    return stored.get(a, a) == stored.get(b, b)


def assert_masters(bits: int, params: Any, state: Any) -> None:
    for name, found in master_params(params, state).items():
        np.testing.assert_allclose(found, WIDE[name], rtol=2.0**-bits, atol=0)


@pytest.mark.cases(slow=3)
@pairs
def test_every_pair_of_modes_is_rejected_by_both_names_or_stores_the_same(dtype, a, b):
    (params, state), tx = start(a, dtype), transform(b, dtype)
    calls: list[Any] = [functools.partial(stepped, tx, through_optax=way) for way in BOTH_WAYS]
    if is_same_storage(dtype, a, b):
        for call in calls:
            assert_masters(bits_of(dtype, a), *call(params, state, GRADIENTS))
        return
    text = rf"made with master_weights='{a}' \(.*\), but tx has '{b}' \(.*convert\("
    for call in (*calls, functools.partial(jax.eval_shape, calls[0])):
        with pytest.raises(ValueError, match=text):
            call(params, state, GRADIENTS)


@pytest.mark.cases(fast=1, slow=9)
@pairs
def test_convert_migrates_from_every_mode_to_every_other(dtype, a, b):
    (params, state), tx, bits = start(a, dtype), transform(b, dtype), bits_of(dtype, a, b)
    made = convert(state, params, to=tx)
    assert jax.tree.structure(made) == jax.tree.structure(tx.init(params))
    assert made.mode == storage_code([dtype], b)
    assert_masters(bits, params, made)
    new, after, finite = apply_gradients(tx, params, made, GRADIENTS)
    assert finite
    assert after.count == 1
    assert_masters(bits, new, after)
    if b not in ("stochastic", "none"):
        assert_same(new, params)


@pytest.mark.cases(fast=20)
@pairs
def test_msgpack_rejects_every_pair_that_stores_otherwise(dtype, a, b):
    saved, target = serialization.to_bytes(start(a, dtype)), start(b, dtype)
    if is_same_storage(dtype, a, b):
        params, state = jax.tree.map(jnp.asarray, serialization.from_bytes(target, saved))
        after = stepped(transform(b, dtype), params, state, GRADIENTS)
        assert_masters(bits_of(dtype, a), *after)
        return
    text = rf"saved with master_weights='{a}', .* into one with master_weights='{b}'"
    with pytest.raises(ValueError, match=text):
        serialization.from_bytes(target, saved)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    folder = tmp_path_factory.mktemp("modes")
    with warnings.catch_warnings():  # orbax's own
        warnings.simplefilter("ignore")
        with checkpoint.StandardCheckpointer() as saver:
            for dtype, mode in sorted({(dtype, a) for dtype, a, _ in PAIRS}):
                saver.save(folder / f"{mode}_{dtype}", start(mode, dtype))
    return folder


def restored(folder: Any, target: Any) -> Any:
    """Restores with Orbax into a target's tree; returns the tree, or None where it rejects."""
    import orbax.checkpoint

    like = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, target)
    with warnings.catch_warnings(), orbax.checkpoint.StandardCheckpointer() as loader:
        warnings.simplefilter("ignore")
        try:
            return loader.restore(folder, like)
        except (ValueError, KeyError):
            return None


@pytest.mark.cases(fast=1, slow=5)
@pairs
def test_orbax_casts_masters_into_another_mode_and_no_step_reads_them(checkpoints, dtype, a, b):
    found = restored(checkpoints / f"{a}_{dtype}", start(b, dtype))
    if found is None:
        assert not is_same_storage(dtype, a, b)
        return
    (params, state), tx = found, transform(b, dtype)
    step = jax.jit(lambda p, s: stepped(tx, p, s, GRADIENTS))
    if is_same_storage(dtype, a, b):
        assert_masters(bits_of(dtype, a), *step(params, state))
        return
    saved = storage_text(storage_code([dtype], a))
    text = rf"masters of another mode: .* as {saved}, .* of master_weights='{b}'"
    for call in (
        lambda: apply_gradients(tx, params, state, GRADIENTS),
        lambda: tx.update(GRADIENTS, state, params),
        lambda: master_params(params, state),
        lambda: resync(params, state),
        lambda: convert(state, params, to=tx),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    if jax.tree.structure(state) != jax.tree.structure(start(b, dtype)[1]):
        return  # what was never saved is missing
    new, after = step(params, state)
    assert_same((new, after.inner), (params, state.inner))
    assert (after.finite, after.skipped, after.count) == (False, 1, 0)
    wide = jax.jit(master_params)(params, state)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(wide))
    followed = jax.jit(resync)(params, state)  # starts from the params
    assert_masters(bits_of(dtype, "none"), params, followed)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_traced_step_of_masters_of_another_mode_changes_nothing(
    mode, through_optax, skip_nonfinite
):
    tx = wrapped(None, "bfloat16", mode, skip_nonfinite=skip_nonfinite)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), WIDE)
    state = tx.init(params)
    step = jax.jit(lambda p, s: stepped(tx, p, s, GRADIENTS, through_optax))
    new, after = step(params, state._replace(mode=state.mode + 1))
    assert_same((new, after.inner, after.masters), (params, state.inner, state.masters))
    assert (after.finite, after.skipped, after.count) == (False, 1, 0)
    new, after = step(params, state)
    assert after.finite
    assert (new["w"] < params["w"]).all()


def test_convert_checks_values_and_rejects_what_it_cannot_migrate():
    params, state = start("full", "bfloat16")
    half, other = start("full", "float16")
    written = {**params, "w": params["w"].at[0, 1].set(7)}
    remainder, none = (transform(mode, "bfloat16") for mode in ("remainder", "none"))
    adam: Any = wrapped(None, "bfloat16")
    text: Any = "none"
    traced = jax.jit(lambda s: convert(s, params, to=none))
    differ = r"masters of state, but differ: w in 1 of 12 elements\. .* resync"
    for call, error, told in (
        (lambda: convert(state, written, to=remainder), ValueError, differ),
        (lambda: traced(state), TypeError, "outside of jit"),
        (lambda: convert(state, params, to=text), TypeError, "but got str"),
        (lambda: convert(state, params, to=adam), ValueError, "whose state has another tree"),
        (lambda: convert(other, half, to=remainder), ValueError, "'remainder' is for bfloat16 par"),
        (lambda: convert(state, half, to=none), ValueError, "params changed since"),
    ):
        with pytest.raises(error, match=told):
            call()
    followed = convert(resync(written, state), written, to=remainder)
    np.testing.assert_array_equal(master_params(written, followed)["w"][0, 1], 7)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_convert_takes_params_that_are_not_finite_as_they_are(value):
    params = {"w": jnp.asarray([1.5, value], jnp.bfloat16)}
    state = transform("full", "bfloat16").init(params)
    for mode in ("remainder", "none"):
        made = convert(state, params, to=transform(mode, "bfloat16"))
        np.testing.assert_array_equal(master_params(params, made)["w"], [1.5, value])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("mode", "found", "needed"),
    [
        ("full", "float16", "float32"),
        ("remainder", "float32", "uint16"),
    ],
)
def test_masters_of_another_dtype_are_rejected_by_name(mode, found, needed):
    params, state = start(mode, "bfloat16")
    state = state._replace(masters={**state.masters, "w": state.masters["w"].astype(found)})
    text = rf"master_weights='{mode}' .*: w is {found}\[3, 4\] instead of {needed}"
    with pytest.raises(ValueError, match=text):
        apply_gradients(transform(mode, "bfloat16"), params, state, GRADIENTS)
