"""A state that is saved, copied or sent comes back whole, and training goes on as before."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale, loss_scale_of, mixed_precision
from tests.policy.optim import saving

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def halfway():
    return saving.run(saving.start(), 0, saving.SAVED)


@pytest.fixture(scope="module")
def restored(halfway, tmp_path_factory):
    """The folder in which a fresh process went on from both checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saving.save(halfway, folder)
    command = [sys.executable, "-W", "ignore", "-m", "tests.policy.optim.saving", str(folder)]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=300
    )
    return folder


@pytest.mark.parametrize("kind", saving.KINDS)
def test_a_fresh_process_goes_on_bit_for_bit_in_every_storage_mode(halfway, restored, kind):
    for mode, (_, state) in halfway.items():
        scale: Any = loss_scale_of(state)
        assert 0 < scale.counter < scale.period, mode
        assert state.inner.mini_step == 1
        assert state.skipped == 1
    eight = halfway[saving.EIGHT_BITS][1].inner.inner_opt_state.inner_state[0]
    assert (eight.mu["a"].dtype, eight.nu["a"].dtype) == (jnp.int8, jnp.float8_e5m2)
    assert (restored / f"{kind}.txt").read_text() == saving.describe(halfway)
    expected = saving.bits(saving.run(halfway, saving.SAVED, saving.STEPS))
    got = np.load(restored / f"{kind}.npz")
    assert len(got.files) == len(expected)
    for name, leaf in zip(got.files, expected, strict=True):
        assert got[name].dtype == leaf.dtype
        np.testing.assert_array_equal(got[name], leaf)


def pickled(tree):
    return pickle.loads(pickle.dumps(tree))


def through_a_state_dict(tree):
    return serialization.from_state_dict(saving.start(), serialization.to_state_dict(tree))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy, through_a_state_dict])
def test_a_copy_is_equal_in_structure_dtypes_and_bits(halfway, copied):
    again = copied(halfway)
    assert saving.describe(again) == saving.describe(halfway)
    for a, b in zip(saving.bits(again), saving.bits(halfway), strict=True):
        np.testing.assert_array_equal(a, b)
    scale: Any = loss_scale_of(again["full"][1])
    kept = (
        scale.period,
        scale.factor,
        scale.min_loss_scale,
        scale.max_loss_scale,
        scale.hysteresis,
    )
    assert kept == (4, 4, 0.5, float(jnp.finfo(jnp.float32).max), 2)


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
def test_a_train_state_goes_through_bytes_and_trains_on(loss_scale):
    tx = mixed_precision(optax.adam(0.1), "bfloat16", loss_scale=loss_scale, master_weights="full")
    make = lambda value: TrainState.create(  # noqa: E731
        apply_fn=None, params={"w": jnp.full(3, value, jnp.bfloat16)}, tx=tx
    )
    gradients = {"w": jnp.full(3, 0.25)}

    def train(state):
        with jax.numpy_dtype_promotion("standard"):
            return state.apply_gradients(grads=gradients)

    saved = train(make(1.0))
    again = serialization.from_bytes(make(0.0), serialization.to_bytes(saved))
    assert jax.tree.structure(again) == jax.tree.structure(saved)
    expected, got = train(saved), train(again)
    for a, b in zip(saving.bits(got), saving.bits(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def state_of(loss_scale, master_weights: Any = "full", dtype=jnp.bfloat16):
    tx = mixed_precision(
        optax.sgd(0.1), "bfloat16", loss_scale=loss_scale, master_weights=master_weights
    )
    return tx.init({"w": jnp.ones(2, dtype)})


def test_a_state_of_another_kind_is_refused_by_name():
    saved = serialization.to_bytes(state_of("dynamic"))
    with pytest.raises(
        ValueError,
        match=r"saved with master_weights='full', params bfloat16, and can't be .*'kahan'",
    ):
        serialization.from_bytes(state_of("dynamic", "kahan"), saved)
    with pytest.raises(
        ValueError, match=r"params bfloat16, and can't .* into one with .*'full', params float16"
    ):
        serialization.from_bytes(state_of("dynamic", dtype=jnp.float16), saved)
    with pytest.raises(
        ValueError,
        match="saved loss scale should have loss_scale, counter, hysteresis_left, but got",
    ):
        serialization.from_bytes(state_of(DynamicLossScale(8.0, hysteresis=2)), saved)
    with pytest.raises(
        ValueError,
        match=r"loss scale has counter, loss_scale, but .* a NoOpLossScale, which has no such",
    ):
        serialization.from_bytes(state_of(None), saved)
