"""A storage mode is one record: a sixth works everywhere that the five do."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import NoOpLossScale, apply_gradients, master_params, mixed_precision
from policy.optim import convert, init_from_master, resync, storage_modes
from policy.optim.rounding import round_to
from policy.optim.storage_modes import (
    STORAGE_MODES,
    MasterWeights,
    StorageMode,
    mode_names,
    storage_code,
    storage_text,
)

WIDE = {"w": jnp.linspace(-2.1, 3.3, 12).reshape(3, 4)}
GRADIENTS = {"w": jnp.full((3, 4), 0.5)}


def _encode(value: jax.Array, dtype: np.dtype, key: jax.Array | None) -> Any:
    param = round_to(value, dtype)
    return param, (value - param.astype(jnp.float32)).astype(jnp.float16)


# the rounding error in float16, which no mode stores; records hold names that types don't list
ERROR = StorageMode(
    name="error",  # pyright: ignore[reportArgumentType]
    code=16,
    init=lambda param: jnp.zeros_like(param, jnp.float16),
    join=lambda param, error: param.astype(jnp.float32) + error.astype(jnp.float32),
    encode=_encode,
    stored_dtype=lambda dtype: np.dtype("float16"),
)


@pytest.fixture
def sixth(monkeypatch) -> Any:
    monkeypatch.setitem(storage_modes.STORAGE_MODES, "error", ERROR)
    return "error"


def wrapped(mode: Any) -> Any:
    tx = optax.sgd(0.0, momentum=0.9)
    return mixed_precision(tx, "bfloat16", master_weights=mode, loss_scale=NoOpLossScale())


def test_every_record_is_listed_under_its_name_with_a_code_of_its_own():
    assert get_args(MasterWeights) == mode_names()
    for name, mode in STORAGE_MODES.items():
        assert mode.name == name
        assert mode.stores == (mode.code > 0)
    codes = [mode.code for mode in STORAGE_MODES.values() if mode.stores]
    assert sorted(codes) == [1, 2, 3]  # checkpoints hold them


@pytest.mark.parametrize("mode", STORAGE_MODES.values(), ids=lambda mode: mode.name)
def test_a_value_that_is_split_is_joined_again(mode):
    value = jnp.linspace(-3.0, 3.0, 101)
    param, stored = mode.split(value, jnp.bfloat16)
    assert param.dtype == jnp.bfloat16
    np.testing.assert_array_equal(param, round_to(value, jnp.bfloat16))
    assert getattr(stored, "dtype", None) == (
        mode.stored_dtype(param.dtype) if mode.stores else None
    )
    bits = {"full": 24, "remainder": 24, "kahan": 16}.get(mode.name, 8)
    np.testing.assert_allclose(mode.join(param, stored), value, rtol=2.0**-bits, atol=0)
    same = mode.decode(mode.encode_same(param, stored), param.dtype)
    jax.tree.map(np.testing.assert_array_equal, same, (param, stored))


def test_a_sixth_record_is_a_mode(sixth):
    tx = wrapped(sixth)
    params, state = init_from_master(tx, WIDE)
    assert state.masters["w"].dtype == jnp.float16
    close = {"rtol": 2.0**-16, "atol": 0}
    np.testing.assert_allclose(master_params(params, state)["w"], WIDE["w"], **close)
    for _ in range(2):
        params, state, finite = apply_gradients(tx, params, state, GRADIENTS)
        assert finite
    np.testing.assert_allclose(master_params(params, state)["w"], WIDE["w"], **close)
    updates, _ = tx.update(GRADIENTS, state, params)
    np.testing.assert_array_equal(updates["w"], 0)
    full = convert(state, params, to=wrapped("full"))
    np.testing.assert_allclose(full.masters["w"], WIDE["w"], **close)
    back = convert(full, params, to=tx)
    np.testing.assert_array_equal(back.masters["w"], state.masters["w"])
    np.testing.assert_array_equal(resync(params, state).masters["w"], 0)


def test_codes_tell_every_storage_of_every_pair_of_dtypes_apart(sixth):
    codes = {
        storage_code(dtypes, mode)
        for mode in ("full", "kahan", sixth)
        for dtypes in (["bfloat16"], ["float16"], ["bfloat16", "float16"])
    }
    assert len(codes) == 9
    both = ["bfloat16", "float16"]
    assert storage_text(storage_code(both, sixth)) == "error for bfloat16, error for float16"
    assert storage_text(storage_code(both, "auto")) == "remainder for bfloat16, full for float16"
    assert storage_text(storage_code(["float16"], "none")) == "nothing"
    assert storage_text(99) == "an unknown storage (99)"
