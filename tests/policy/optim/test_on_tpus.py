"""Steps that TPUs compute in another way give the same numbers, bit for bit where bits are kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from policy import apply_gradients, mixed_precision
from policy.grads.finiteness import _sum, _sum_by_matmul
from policy.optim.storage_modes import _halves, _halves_in_turn, pack


def test_halves_taken_in_turn_are_the_halves():
    numbers = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    special = np.array(
        [0, 1, 0x8000, 0x7FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00008000],
        np.uint32,
    )
    pair = pack(
        lax.bitcast_convert_type(
            jnp.concatenate([jnp.asarray(special), jnp.asarray(numbers)]), jnp.float32
        )
    )
    (high, low), (expected_high, expected_low) = _halves_in_turn(pair), _halves(pair, jnp.bfloat16)
    assert (high.dtype, low.dtype) == (jnp.bfloat16, jnp.uint16)
    np.testing.assert_array_equal(low, expected_low)
    np.testing.assert_array_equal(jnp.isnan(high), jnp.isnan(expected_high))
    is_number = ~jnp.isnan(expected_high)  # a NaN may lose its payload
    bits, expected_bits = (
        lax.bitcast_convert_type(jnp.where(is_number, x, 0), jnp.uint16)
        for x in (high, expected_high)
    )
    np.testing.assert_array_equal(bits, expected_bits)


@pytest.mark.parametrize("shape", [(512, 256), (256, 512), (2, 256, 256), (64,), (3, 3, 128, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("value", [1.0, np.inf, -np.inf, np.nan])
def test_the_sum_by_matmul_is_finite_where_the_sum_is(shape, value, dtype):
    x = jnp.full(shape, 0.5, dtype).at[(1,) * len(shape)].set(value)
    magnitudes = jnp.abs(x)
    total, expected = _sum_by_matmul(magnitudes), _sum(magnitudes)
    assert total.dtype == jnp.float32
    assert jnp.isfinite(total) == jnp.isfinite(expected) == np.isfinite(value)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("through_optax", [False, True])
@pytest.mark.parametrize(
    "dtype, mode",
    [("float32", "none"), ("bfloat16", "remainder"), ("bfloat16", "full"), ("bfloat16", "kahan")],
)
def test_what_tpus_run_is_the_step(monkeypatch, dtype, mode, through_optax):
    tx = mixed_precision(optax.adamw(1e-2), "mixed_bfloat16", master_weights=mode)
    params = {"w": jax.random.normal(jax.random.key(0), (512, 256)).astype(dtype)}
    good = {"w": jnp.full((512, 256), 0.5, jnp.bfloat16)}
    bad = {"w": good["w"].at[7, 7].set(jnp.inf)}

    def step(params, state, gradients):
        if through_optax:
            return tx.update(gradients, state, params)
        return apply_gradients(tx, params, state, gradients)[:2]

    state = tx.init(params)
    expected = [jax.jit(step)(params, state, gradients) for gradients in (good, bad)]
    monkeypatch.setattr(lax, "platform_dependent", lambda *operands, tpu, default: tpu(*operands))
    jax.clear_caches()
    got = [jax.jit(step)(params, state, gradients) for gradients in (good, bad)]
    # XLA may fuse the two differently: an ulp of float32, which a remainder holds in integers
    exact, close = (
        np.testing.assert_array_equal,
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
    )
    jax.tree.map(exact, got[1], expected[1])
    if mode == "remainder":
        got[0], expected[0] = (
            [x for x in jax.tree.leaves(r) if x.dtype != jnp.uint16] for r in (got[0], expected[0])
        )
    wide = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]  # noqa: E731
    jax.tree.map(close, wide(got[0]), wide(expected[0]))
