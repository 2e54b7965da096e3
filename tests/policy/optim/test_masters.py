"""Master weights: their storage and rounding, and that params never drift from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import NoOpLossScale, apply_gradients, master_params, mixed_precision
from policy.optim import init_from_master, resync
from policy.optim.rounding import round_to

RNG = np.random.default_rng(0)
HALF = [jnp.bfloat16, jnp.float16]
KEY = jax.random.key(0)


def params_in(dtype):
    return {
        "b": jnp.asarray(RNG.normal(size=7), dtype),
        "w": jnp.asarray(RNG.normal(size=(3, 5)), dtype),
    }


def gradients_for(params, steps):
    """Returns gradients of many magnitudes, the same for all params."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: jnp.asarray(
            rng.normal(size=(steps, *p.shape))
            * 10 ** rng.uniform(-6, 2, (steps, 1)).reshape(steps, *[1] * p.ndim),
            jnp.float32,
        ),
        params,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("through_optax", [False, True])
def test_the_adamw_master_trajectory_equals_plain_float32_optax_bit_for_bit(dtype, through_optax):
    params, steps = params_in(dtype), 1000
    gradients = gradients_for(params, steps)
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=1e-2)
    tx = mixed_precision(adamw, jnp.dtype(dtype).name, loss_scale="dynamic")

    def ours(carry, gradient):
        params, state = carry
        if through_optax:
            updates, state = tx.update(gradient, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
        else:
            params, state, _ = apply_gradients(tx, params, state, gradient)
        return (params, state), (params, master_params(params, state))

    def plain(wide, state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradient, state, wide)
            return apply(wide, updates), state

    # Where params are float32, optax's contract rounds the update before it is added; XLA would
    # fuse the two into one
    # rounding in plain optax. In all other cases masters are as in the fused step.
    apart = through_optax and dtype == jnp.float32
    update: Any = jax.jit(adamw.update) if apart else adamw.update
    apply = jax.jit(optax.apply_updates) if apart else optax.apply_updates
    step_plain: Any = plain if apart else jax.jit(plain)

    _, (stored, masters) = jax.lax.scan(ours, (params, tx.init(params)), gradients)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, expected = adamw.init(wide), []
    rows = jax.tree.map(np.asarray, gradients)
    for step in range(
        steps
    ):  # not a scan: XLA compiles plain optax's body differently there, by an ulp
        wide, state = step_plain(wide, state, jax.tree.map(lambda g, step=step: g[step], rows))
        expected.append(wide)
    jax.tree.map(lambda m, *e: np.testing.assert_array_equal(m, np.stack(e)), masters, *expected)
    # and the params are the rounded master after every step
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype(dtype)}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, round_to(m, dtype)), stored, masters)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("mode", ["auto", "full", "kahan", "stochastic", "none"])
def test_a_thousand_small_steps_move_a_half_precision_weight_unless_it_has_no_master(dtype, mode):
    params = jnp.ones(256, dtype)
    tx = mixed_precision(
        optax.sgd(1e-4), "bfloat16", master_weights=mode, key=KEY if mode == "stochastic" else None
    )
    step = lambda carry, _: (apply_gradients(tx, carry[0], carry[1], jnp.ones(256))[:2], None)  # noqa: E731
    (end, state), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=1000)
    ulp = float(jnp.finfo(dtype).eps) / 2  # below 1
    moved = np.asarray(master_params(end, state)).mean()
    # stochastic: each element walks at random by ulps, with a variance of 1000 · 1e-4 · ulp; four
    # sigma of the mean
    allowed = {"kahan": 1e-3, "stochastic": 4 * (0.1 * ulp / 256) ** 0.5}.get(mode, 3e-5)
    assert abs(moved - (1.0 if mode == "none" else 0.9)) < allowed
    np.testing.assert_allclose(end.astype(jnp.float32).mean(), moved, atol=ulp)


@pytest.mark.parametrize("through_optax", [False, True])
def test_remainder_equals_full_bit_for_bit(through_optax):
    start = np.concatenate(
        [RNG.normal(size=200) * 10.0 ** RNG.integers(-6, 6, 200), [0, -0.0, 1, 2.0**-126, 3e38]]
    )
    params = jnp.asarray(start, jnp.bfloat16)
    adamw = optax.adamw(1e-2, weight_decay=1e-2)
    remainder, full = (
        mixed_precision(adamw, "bfloat16", master_weights=mode) for mode in ("remainder", "full")
    )

    def step(tx: Any, params: Any, state: Any, gradient: Any) -> Any:
        if not through_optax:
            return apply_gradients(tx, params, state, gradient)[:2]
        updates, state = tx.update(gradient, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    def both(carry, gradient):
        stepped = [
            step(tx, p, s, gradient) for tx, (p, s) in zip((remainder, full), carry, strict=True)
        ]
        return stepped, [(p, master_params(p, s)) for p, s in stepped]

    gradients = gradients_for(params, 1000).at[500].set(jnp.nan)  # one step is skipped
    _, ((p, m), (other_p, other_m)) = jax.lax.scan(
        both, [(params, t.init(params)) for t in (remainder, full)], gradients
    )
    bits = lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}")  # noqa: E731
    np.testing.assert_array_equal(bits(m), bits(other_m))
    misses = bits(p) != bits(other_p)
    misses |= bits(p) != bits(round_to(m, jnp.bfloat16))
    assert misses.sum() == 0 if not through_optax else misses.sum() <= 1
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
    key = KEY if mode == "stochastic" else None
    none = NoOpLossScale()
    tx = mixed_precision(optax.adam(1e-2), dtype, loss_scale=none, master_weights=mode, key=key)
    params, state = init_from_master(tx, wide)
    assert params["w"].dtype == dtype
    assert params["_overwrite_with_gradient"]["s"].dtype == jnp.float32
    masters = jax.tree.map(np.array, master_params(params, state))
    np.testing.assert_allclose(masters["w"], wide["w"], rtol=0 if bits == 24 else 2.0**-bits)
    np.testing.assert_array_equal(masters["_overwrite_with_gradient"]["s"], 1)
    np.testing.assert_array_equal(params["w"], round_to(wide["w"], dtype))
    zero = jax.tree.map(jnp.zeros_like, wide)
    stepped, after, _ = jax.jit(
        lambda p, s, g: apply_gradients(tx, p, s, g), donate_argnums=(0, 1)
    )(params, state, zero)
    np.testing.assert_array_equal(master_params(stepped, after)["w"], masters["w"])
    assert jnp.isfinite(wide["w"]).all()  # donation took none of the caller's


def test_resync_follows_what_was_written_and_keeps_the_rest():
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(1e-3), "bfloat16", master_weights="full")
    params, state, _ = apply_gradients(
        tx, params, tx.init(params), {"w": jnp.ones(4), "v": jnp.ones(2)}
    )
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
    tx = mixed_precision(optax.sgd(1e-3), "bfloat16", master_weights=mode)
    params, state, _ = apply_gradients(tx, params, tx.init(params), jnp.ones(4))
    written = params.at[0].set(1.5)
    assert abs(master_params(written, state)[0] - 1.5) <= 2.0**-7  # an ulp; the low bits are stale
    assert master_params(written, state)[0] != 1.5
    np.testing.assert_array_equal(
        master_params(written, resync(written, state)), written.astype(jnp.float32)
    )


def test_a_full_master_hands_its_low_bits_to_a_remainder_when_float16_becomes_bfloat16():
    wide = jnp.asarray(RNG.normal(size=50), jnp.float32)
    tx = mixed_precision(optax.sgd(1e-3), "float16", loss_scale=NoOpLossScale())
    params, state = init_from_master(tx, wide)
    cast = round_to(master_params(params, state), jnp.bfloat16)
    state = resync(cast, state)
    assert state.masters.dtype == jnp.uint16
    np.testing.assert_array_equal(master_params(cast, state), wide)


def test_a_changed_dtype_is_refused_by_name_and_resync_accepts_it():
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3, jnp.bfloat16)}
    tx = mixed_precision(optax.adam(1e-2), "bfloat16")
    state = tx.init(params)
    gradients = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    text = (
        r"changed since the optimizer state was made: a/w was float32\[2\] and is bfloat16\[2\]\. "
        r".* call resync\(params, state\)"
    )
    cast = {"a": {"w": jnp.ones(2, jnp.bfloat16)}, "b": params["b"]}
    other_half = {"a": params["a"], "b": params["b"].astype(jnp.float16)}
    for call in (
        lambda p: apply_gradients(tx, p, state, gradients),
        lambda p: tx.update(gradients, state, p),
        lambda p: master_params(p, state),
    ):
        with pytest.raises(ValueError, match=text):
            call(cast)
        with pytest.raises(ValueError, match=r"b was bfloat16\[3\] and is float16"):
            call(other_half)
    for changed in (cast, other_half):
        new, after, _ = apply_gradients(tx, changed, resync(changed, state), gradients)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, changed)
        assert after.count == 1


def test_init_from_master_makes_no_master_of_float32_params_and_narrows_wider_ones():
    params, state = init_from_master(
        mixed_precision(optax.adam(1e-2), "mixed_bfloat16"), {"w": jnp.ones(3)}
    )
    assert params["w"].dtype == jnp.float32
    assert not jax.tree.leaves(state.masters)
    with jax.enable_x64(True):
        tx = mixed_precision(optax.sgd(1e-2), "bfloat16")
        params, state = init_from_master(tx, {"w": jnp.full(3, 1 / 3, jnp.float64)})
        np.testing.assert_array_equal(master_params(params, state)["w"], np.float32(1 / 3))
