"""Master weights: what is kept, how it is rounded, and that params never drift from it."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from policy.optim import apply_gradients, init_from_master, master_params, mixed_precision, resync
from policy.optim.masters import round_to

RNG = np.random.default_rng(0)
HALF = [jnp.bfloat16, jnp.float16]


def params_in(dtype):
    return {"b": jnp.asarray(RNG.normal(size=7), dtype), "w": jnp.asarray(RNG.normal(size=(3, 5)), dtype)}


def test_bfloat16_is_rounded_half_away_from_zero():
    one, ulp = np.float32(1), np.float32(2.0**-7)
    x = jnp.asarray(
        [1, 1 + ulp / 2, -1 - ulp / 2, one + ulp * 0.499, one + ulp * 1.5, 0.0, -0.0, 2.0**-140], jnp.float32
    )
    rounded: jax.Array = jax.jit(lambda x: round_to(x, jnp.bfloat16))(x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rounded.astype(jnp.float32)[:7], np.asarray([1, 1 + ulp, -1 - ulp, 1, 1 + 2 * ulp, 0, -0.0], np.float32)
    )
    assert np.signbit(np.asarray(rounded, np.float32)[6])


def test_rounding_equals_round_to_nearest_wherever_there_is_no_tie():
    bits = RNG.integers(0, 2**32, 20000, dtype=np.uint32)
    bits = bits[(bits & 0xFFFF) != 0x8000]
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    ours = np.asarray(round_to(jnp.asarray(x), jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(ours, expected)  # NaN for NaN, inf where the value is beyond the largest by half


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0xFF800001])
def test_rounding_keeps_nan_and_infinity(bits):
    nan = jnp.asarray(np.array([bits], np.uint32).view(np.float32))
    assert jnp.isnan(round_to(nan, jnp.bfloat16)).all()
    assert (round_to(jnp.array([np.inf, -np.inf]), jnp.bfloat16) == jnp.array([np.inf, -np.inf], jnp.bfloat16)).all()
    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    assert round_to(jnp.array([largest]), jnp.bfloat16)[0] == jnp.bfloat16(largest)


def gradients_for(params, steps):
    """Of many magnitudes; the same whatever the params are."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: jnp.asarray(
            rng.normal(size=(steps, *p.shape)) * 10 ** rng.uniform(-6, 2, (steps, 1)).reshape(steps, *[1] * p.ndim),
            jnp.float32,
        ),
        params,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("through_optax", [False, True])
def test_the_adamw_master_trajectory_equals_plain_float32_optax_bit_for_bit(dtype, through_optax):
    params, steps = params_in(dtype), 300
    gradients = gradients_for(params, steps)
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=1e-2)
    tx = mixed_precision(adamw, "bfloat16", loss_scale="dynamic")

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

    # Where params are float32, optax's contract rounds the update before it is added; XLA would fuse the two into one
    # rounding in plain optax. In all other cases masters are as in the fused step.
    apart = through_optax and dtype == jnp.float32
    update: Any = jax.jit(adamw.update) if apart else adamw.update
    apply = jax.jit(optax.apply_updates) if apart else optax.apply_updates
    step_plain: Any = plain if apart else jax.jit(plain)

    _, (stored, masters) = jax.lax.scan(ours, (params, tx.init(params)), gradients)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, expected = adamw.init(wide), []
    for step in range(steps):  # not a scan: XLA compiles plain optax's body differently there, by an ulp
        wide, state = step_plain(wide, state, jax.tree.map(lambda g, step=step: g[step], gradients))
        expected.append(wide)
    jax.tree.map(lambda m, *e: np.testing.assert_array_equal(m, np.stack(e)), masters, *expected)
    # and the params are the rounded master after every step
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype(dtype)}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, round_to(m, dtype)), stored, masters)


@pytest.mark.parametrize(("master_weights", "expected"), [("auto", 0.9), ("full", 0.9), ("none", 1.0)])
def test_a_hundred_steps_of_a_thousandth_move_a_bfloat16_weight_that_has_a_master(master_weights, expected):
    params = jnp.ones(4, jnp.bfloat16)
    tx = mixed_precision(optax.sgd(1e-3), "bfloat16", master_weights=master_weights)
    step = lambda carry, _: (apply_gradients(tx, carry[0], carry[1], jnp.ones(4))[:2], None)  # noqa: E731
    (end, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=100)
    np.testing.assert_allclose(end.astype(jnp.float32), expected, rtol=2.0**-8)  # half an ulp


def test_wide_params_have_no_master_in_any_mode():
    params = {"f32": jnp.ones(2), "bf16": jnp.ones(2, jnp.bfloat16), "f16": jnp.ones(2, jnp.float16)}
    modes: list[tuple[Any, list[str]]] = [
        ("auto", ["bf16", "f16"]),
        ("full", ["bf16", "f16"]),
        ("none", []),
        (None, []),
    ]
    for mode, kept in modes:
        masters = mixed_precision(optax.sgd(0.1), "float32", master_weights=mode).init(params).masters
        assert [name for name, m in masters.items() if not isinstance(m, optax.MaskedNode)] == kept
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(masters))


def test_params_without_a_master_are_rounded_after_each_step():
    params = jnp.ones(3, jnp.bfloat16)
    tx = mixed_precision(optax.sgd(1.0), "bfloat16", master_weights=None)
    new, state, _ = apply_gradients(tx, params, tx.init(params), jnp.full(3, 0.1))
    np.testing.assert_array_equal(new, round_to(jnp.full(3, np.float32(1) - np.float32(0.1)), jnp.bfloat16))
    np.testing.assert_array_equal(master_params(new, state), new.astype(jnp.float32))


def test_init_from_master_keeps_the_low_bits():
    wide = {"w": jnp.asarray(RNG.normal(size=50), jnp.float32), "_overwrite_with_gradient": {"s": jnp.ones(2)}}
    tx = mixed_precision(optax.adam(1e-2), "bfloat16")
    params, state = init_from_master(tx, wide)
    assert params["w"].dtype == jnp.bfloat16
    assert params["_overwrite_with_gradient"]["s"].dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, master_params(params, state), wide)
    np.testing.assert_array_equal(params["w"], round_to(wide["w"], jnp.bfloat16))
    zero = jax.tree.map(jnp.zeros_like, wide)
    stepped, after, _ = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g), donate_argnums=(0, 1))(
        params, state, zero
    )
    np.testing.assert_array_equal(master_params(stepped, after)["w"], wide["w"])  # donation took none of the caller's

    tx = mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    params, state = init_from_master(tx, {"w": wide["w"]})
    assert params["w"].dtype == jnp.float32
    assert not jax.tree.leaves(state.masters)


def test_resync_follows_what_was_written_and_keeps_the_rest():
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(1e-3), "bfloat16")
    params, state, _ = apply_gradients(tx, params, tx.init(params), {"w": jnp.ones(4), "v": jnp.ones(2)})
    low = np.float32(1) - np.float32(1e-3)
    np.testing.assert_array_equal(state.masters["w"], low)
    written = {**params, "w": params["w"].at[0].set(0.5).at[1].set(jnp.nan)}
    state = jax.jit(resync)(written, state)
    np.testing.assert_array_equal(state.masters["w"], np.asarray([0.5, np.nan, low, low], np.float32))
    assert state.count == 1


def test_a_changed_dtype_is_refused_by_name_and_resync_accepts_it():
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3, jnp.bfloat16)}
    tx = mixed_precision(optax.adam(1e-2), "bfloat16")
    state = tx.init(params)
    gradients = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    text = (
        r"changed since the optimizer state was made: a/w was float32 and is bfloat16\. .* call resync\(params, state\)"
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
        with pytest.raises(ValueError, match="b was bfloat16 and is float16"):
            call(other_half)
    for changed in (cast, other_half):
        new, after, _ = apply_gradients(tx, changed, resync(changed, state), gradients)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, changed)
        assert after.count == 1


def test_bad_calls_are_refused():
    tx = mixed_precision(optax.sgd(0.1), "bfloat16")
    with pytest.raises(TypeError, match="resync takes a MixedPrecisionState, but got tuple"):
        resync({}, ())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="params should be the tree that the optimizer state was made from"):
        resync({"w": jnp.ones(2)}, tx.init({"v": jnp.ones(2)}))
    with pytest.raises(TypeError, match="tx should be what mixed_precision returned, but got GradientTransformation"):
        init_from_master(optax.sgd(0.1), {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="params should be floating arrays of 16 bits or more, but n is int32"):
        init_from_master(tx, {"n": jnp.int32(1)})
