"""Master weights: they move as in float32, and params never drift from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import apply_gradients, master_params
from policy.optim import init_from_master, resync
from policy.optim.storage_modes import round_to
from tests.policy.optim.steps import BOTH_WAYS, assert_same, bits, dtypes, stepped, wrapped

RNG = np.random.default_rng(0)
HALF = [jnp.bfloat16, jnp.float16]


def gradients_for(params: Any, steps: int) -> Any:
    """Returns gradients of many magnitudes, the same for all params."""
    rng = np.random.default_rng(1)

    def one(p):
        sizes = 10 ** rng.uniform(-6, 2, (steps, *[1] * p.ndim))
        return jnp.asarray(rng.normal(size=(steps, *p.shape)) * sizes, jnp.float32)

    return jax.tree.map(one, params)


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_the_adamw_master_trajectory_equals_plain_float32_optax_bit_for_bit(dtype, through_optax):
    steps = 1000
    params = {"b": RNG.normal(size=7), "w": RNG.normal(size=(3, 5))}
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)
    gradients = gradients_for(params, steps)
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=1e-2)
    tx = wrapped(adamw, jnp.dtype(dtype).name, loss_scale="dynamic")

    def ours(carry, gradient):
        params, state = stepped(tx, *carry, gradient, through_optax)
        return (params, state), (params, master_params(params, state))

    def plain(wide, state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradient, state, wide)
            return apply(wide, updates), state

    # Where params are float32, optax's contract rounds the update before it is added; XLA would
    # fuse the two into one rounding in plain optax. In all other cases masters are as in the fused
    # step.
    apart = through_optax and dtype == jnp.float32
    update: Any = jax.jit(adamw.update) if apart else adamw.update
    apply = jax.jit(optax.apply_updates) if apart else optax.apply_updates
    step_plain: Any = plain if apart else jax.jit(plain)

    _, (stored, masters) = jax.lax.scan(ours, (params, tx.init(params)), gradients)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, expected = adamw.init(wide), []
    rows = jax.tree.map(np.asarray, gradients)
    # not a scan: XLA compiles plain optax's body differently there, by an ulp
    for step in range(steps):
        wide, state = step_plain(wide, state, jax.tree.map(lambda g, step=step: g[step], rows))
        expected.append(wide)
    jax.tree.map(lambda m, *e: np.testing.assert_array_equal(m, np.stack(e)), masters, *expected)
    # and the params are the rounded master after every step
    assert set(dtypes(stored)) == {jnp.dtype(dtype).name}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, round_to(m, dtype)), stored, masters)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("mode", ["auto", "full", "kahan", "stochastic", "none"])
def test_a_thousand_small_steps_move_a_half_precision_weight_unless_it_has_no_master(dtype, mode):
    params = jnp.ones(256, dtype)
    tx = wrapped(optax.sgd(1e-4), "bfloat16", mode)
    step = lambda carry, _: (stepped(tx, *carry, jnp.ones(256)), None)  # noqa: E731
    (end, state), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=1000)
    ulp = float(jnp.finfo(dtype).eps) / 2  # below 1
    moved = np.asarray(master_params(end, state)).mean()
    # stochastic: each element walks at random by ulps, with a variance of 1000 · 1e-4 · ulp; four
    # sigma of the mean
    allowed = {"kahan": 1e-3, "stochastic": 4 * (0.1 * ulp / 256) ** 0.5}.get(mode, 3e-5)
    assert abs(moved - (1.0 if mode == "none" else 0.9)) < allowed
    np.testing.assert_allclose(end.astype(jnp.float32).mean(), moved, atol=ulp)


@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_remainder_equals_full_bit_for_bit(through_optax):
    start = RNG.normal(size=200) * 10.0 ** RNG.integers(-6, 6, 200)
    params = jnp.asarray([*start, 0, -0.0, 1, 2.0**-126, 3e38], jnp.bfloat16)
    gradients = gradients_for(params, 1000).at[500].set(jnp.nan)  # one step is skipped

    def trajectory(mode):
        tx = wrapped(optax.adamw(1e-2, weight_decay=1e-2), "bfloat16", mode)

        def step(carry, gradient):
            params, state = stepped(tx, *carry, gradient, through_optax)
            return (params, state), (params, master_params(params, state))

        found = jax.lax.scan(step, (params, tx.init(params)), gradients)[1]
        return (*bits(found), bits(round_to(found[1], jnp.bfloat16))[0])

    (p, m, rounded), (other_p, other_m, _) = map(trajectory, ("remainder", "full"))
    np.testing.assert_array_equal(m, other_m)
    misses = (p != other_p) | (p != rounded)
    assert misses.sum() <= int(through_optax)
    assert not (misses[:-1] & misses[1:]).any()


@pytest.mark.parametrize(
    ("mode", "dtype", "bits"),
    [
        ("remainder", "bfloat16", 24),
        ("full", "bfloat16", 24),
        ("full", "float16", 24),
        ("kahan", "bfloat16", 17),
        ("kahan", "float16", 23),
        ("stochastic", "bfloat16", 8),
        ("none", "bfloat16", 8),
    ],
)
def test_init_from_master_keeps_the_low_bits(mode, dtype, bits):
    wide = {
        "w": jnp.asarray(RNG.uniform(1, 2, size=50), jnp.float32),
        "_overwrite_with_gradient": {"s": jnp.ones(2)},
    }
    tx = wrapped(None, dtype, mode)
    params, state = init_from_master(tx, wide)
    assert params["_overwrite_with_gradient"]["s"].dtype == jnp.float32
    masters = jax.tree.map(np.array, master_params(params, state))
    np.testing.assert_allclose(masters["w"], wide["w"], rtol=0 if bits == 24 else 2.0**-bits)
    np.testing.assert_array_equal(masters["_overwrite_with_gradient"]["s"], 1)
    assert_same(params["w"], round_to(wide["w"], dtype))
    step = jax.jit(lambda p, s, g: stepped(tx, p, s, g), donate_argnums=(0, 1))
    after = step(params, state, jax.tree.map(jnp.zeros_like, wide))
    assert_same(master_params(*after)["w"], masters["w"])
    assert jnp.isfinite(wide["w"]).all()  # donation took none of the caller's


def test_init_from_master_makes_no_master_of_float32_params_and_narrows_wider_ones():
    params, state = init_from_master(wrapped(None, "mixed_bfloat16"), {"w": jnp.ones(3)})
    assert params["w"].dtype == jnp.float32
    assert not jax.tree.leaves(state.masters)
    with jax.enable_x64(True):
        wide = {"w": jnp.full(3, 1 / 3, jnp.float64)}
        params, state = init_from_master(wrapped(None, "bfloat16"), wide)
        np.testing.assert_array_equal(master_params(params, state)["w"], np.float32(1 / 3))


# --- Params that were written to ------------------------------------------------------------------


def test_resync_follows_what_was_written_and_keeps_the_rest():
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.ones(2)}
    tx = wrapped(optax.sgd(1e-3), "bfloat16", "full")
    gradients = {"w": jnp.ones(4), "v": jnp.ones(2)}
    params, state = stepped(tx, params, tx.init(params), gradients)
    low = np.float32(1) - np.float32(1e-3)
    np.testing.assert_array_equal(state.masters["w"], low)
    written = {**params, "w": params["w"].at[0].set(0.5).at[1].set(jnp.nan)}
    state = jax.jit(resync)(written, state)
    np.testing.assert_array_equal(
        state.masters["w"], np.asarray([0.5, np.nan, low, low], np.float32)
    )
    assert state.count == 1


@pytest.mark.parametrize("mode", ["remainder", "kahan"])
def test_resync_starts_from_the_params_where_nothing_tells_what_was_written(mode):
    params = jnp.ones(4, jnp.bfloat16)
    tx = wrapped(optax.sgd(1e-3), "bfloat16", mode)
    params, state = stepped(tx, params, tx.init(params), jnp.ones(4))
    written = params.at[0].set(1.5)
    assert 0 < abs(master_params(written, state)[0] - 1.5) <= 2.0**-7  # the low bits are stale
    assert_same(master_params(written, resync(written, state)), written.astype(jnp.float32))


def test_a_full_master_hands_its_low_bits_to_a_remainder_when_float16_becomes_bfloat16():
    wide = jnp.asarray(RNG.normal(size=50), jnp.float32)
    params, state = init_from_master(wrapped(None, "float16"), wide)
    cast = round_to(master_params(params, state), jnp.bfloat16)
    state = resync(cast, state)
    assert state.masters.dtype == jnp.uint16
    assert_same(master_params(cast, state), wide)


def test_a_changed_dtype_is_refused_by_name_and_resync_accepts_it():
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3, jnp.bfloat16)}
    tx = wrapped(None, "bfloat16")
    state, gradients = tx.init(params), jax.tree.map(lambda p: jnp.ones(p.shape), params)
    text = (
        r"changed since the optimizer state was made: a/w was float32\[2\] and is bfloat16\[2\]\. "
        r".* call resync\(params, state\)"
    )
    cast = {"a": {"w": jnp.ones(2, jnp.bfloat16)}, "b": params["b"]}
    other_half = {"a": params["a"], "b": params["b"].astype(jnp.float16)}
    for changed, told in ((cast, text), (other_half, r"b was bfloat16\[3\] and is float16")):
        for call in (
            lambda p: apply_gradients(tx, p, state, gradients),
            lambda p: tx.update(gradients, state, p),
            lambda p: master_params(p, state),
        ):
            with pytest.raises(ValueError, match=told):
                call(changed)
        new, after = stepped(tx, changed, resync(changed, state), gradients)
        assert dtypes(new) == dtypes(changed)
        assert after.count == 1
