"""A state that is saved, copied or sent comes back whole, and training goes on as before."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

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


def state_of(loss_scale, dtype=jnp.bfloat16):
    tx = mixed_precision(optax.sgd(0.1), "bfloat16", loss_scale=loss_scale, master_weights="full")
    return tx.init({"w": jnp.ones(2, dtype)})


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (("dynamic", jnp.float16), r"'full', params bfloat16, and can't .*='full', params float16"),
        (
            (DynamicLossScale(8.0, hysteresis=2),),
            "saved loss scale should have loss_scale, counter, hysteresis_left, but got",
        ),
        ((None,), r"loss scale has counter, loss_scale, but .* a NoOpLossScale, which has no such"),
    ],
)
def test_a_state_of_another_kind_is_refused_by_name(target, text):
    saved = serialization.to_bytes(state_of("dynamic"))
    with pytest.raises(ValueError, match=text):
        serialization.from_bytes(state_of(*target), saved)
