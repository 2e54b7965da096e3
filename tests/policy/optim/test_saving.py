"""A state that is saved, copied or sent comes back whole, and training goes on as before."""

import copy
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale, loss_scale_of
from tests.eight_devices import run_python
from tests.policy.optim import saving
from tests.policy.optim.steps import assert_same, bits, wrapped


@pytest.fixture(scope="module")
def halfway():
    return saving.run(saving.start(), 0, saving.SAVED)


@pytest.fixture(scope="module")
def restored(halfway, tmp_path_factory):
    """The folder in which a fresh process went on from both checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saving.save(halfway, folder)
    run_python("-W", "ignore", "-m", "tests.policy.optim.saving", str(folder))
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
    expected = bits(saving.run(halfway, saving.SAVED, saving.STEPS))
    got = np.load(restored / f"{kind}.npz")
    assert_same([got[name] for name in got.files], expected)


def pickled(tree):
    return pickle.loads(pickle.dumps(tree))


def through_a_state_dict(tree):
    return serialization.from_state_dict(saving.start(), serialization.to_state_dict(tree))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy, through_a_state_dict])
def test_a_copy_is_equal_in_structure_dtypes_and_bits(halfway, copied):
    assert_same(copied(halfway), halfway)


def state_of(loss_scale, dtype=jnp.bfloat16):
    tx = wrapped(optax.sgd(0.1), "bfloat16", "full", loss_scale=loss_scale)
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
