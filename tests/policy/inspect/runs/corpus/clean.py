"""Runs without faults, which have to have no advice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy
from mpmodules import linen as nn
from policy import DynamicLossScale
from tests.policy.inspect.runs.corpus.training import (
    BF16,
    F32,
    OUT,
    ROWS,
    STEPS,
    WIDTH,
    batches,
    clean,
    linen,
    nnx_run,
    plain,
    step_of,
    times,
    watch,
)

DYNAMIC = {"loss_scale": "dynamic"}
HALF = {"dtype": BF16, "param_dtype": BF16}


def rms_norm(h):
    wide = h.astype(F32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(h.dtype)


@clean
def float32_with_sgd():
    return linen(jnp.tanh, batches(), dtype=F32)


@clean
def float32_with_a_learning_rate_that_decays_to_0_in_nnx():
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    return nnx_run(jnp.tanh, batches(), dtype=F32, tx=tx)


@clean
def a_warm_up_from_0():
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 8, 30))
    return plain(rms_norm, batches(30), dtype=BF16, tx=tx)


@clean
def mixed_float16_with_a_dynamic_scale():
    return linen(rms_norm, batches(), text="mixed_float16", options=DYNAMIC)


@clean
def mixed_float16_in_nnx():
    tx = optax.adam(1e-3)
    return nnx_run(jax.nn.relu, batches(), text="mixed_float16", options=DYNAMIC, tx=tx)


@clean
def a_scale_that_settles():
    options = {"loss_scale": DynamicLossScale(2.0**26)}
    return plain(jnp.tanh, batches(20), text="mixed_float16", options=options)


@clean
def a_scale_that_settles_in_nnx():
    options = {"loss_scale": DynamicLossScale(2.0**26)}
    return nnx_run(jnp.tanh, batches(20), text="mixed_float16", options=options)


@clean
def bfloat16_params_with_their_remainders():
    return linen(jnp.tanh, batches(), tx=optax.adamw(1e-5), text="bfloat16", **HALF)


@clean
def bfloat16_params_that_are_rounded_by_chance():
    options = {"master_weights": "stochastic", "key": jax.random.key(1)}
    tx = optax.adamw(1e-5)
    return plain(jnp.tanh, batches(), tx=tx, text="bfloat16", options=options, **HALF)


@clean
def moments_in_8_bits():
    options = {"moment_dtype": {"mu": "int8", "nu": "int8"}, "key": jax.random.key(1)}
    return linen(jnp.tanh, batches(), tx=optax.adam(1e-3), text="bfloat16", options=options, **HALF)


@clean
def a_stack_of_layers_in_bfloat16():
    return linen(rms_norm, batches(), dtype=BF16, scan=True)


@clean
def a_stack_of_layers_in_float16_in_nnx():
    return nnx_run(rms_norm, batches(), text="mixed_float16", options=DYNAMIC, scan=True)


@clean
def a_mask_of_minus_infinity():
    def attention(h):
        mask = jnp.tril(jnp.ones((len(h), len(h)), bool))
        return jax.nn.softmax(jnp.where(mask, h @ h.T / 4, -jnp.inf), -1) @ h

    return linen(attention, batches(), dtype=BF16)


@clean
def a_logarithm_that_is_not_chosen():
    def logarithm(h):
        return jnp.where(h > 0, jnp.log(jnp.where(h > 0, h, 1)), 0)

    return plain(logarithm, batches(), dtype=F32)


@clean
def sparse_gradients_of_a_table():
    def table(h):
        ids = jnp.argmax(h, -1)
        return jnp.zeros_like(h) + jax.nn.one_hot(ids, h.shape[-1], dtype=h.dtype)

    return nnx_run(table, batches(), dtype=F32)


@clean
def codes_by_their_largest_number():
    def cast(h):
        scale = jnp.max(jnp.abs(h), -1, keepdims=True) / 127
        codes = jnp.clip(jnp.round(h / scale), -127, 127).astype(jnp.int8)
        return h + jax.lax.stop_gradient(codes.astype(BF16) * scale - h)

    return linen(cast, batches(), dtype=BF16)


def layers_of(text, **options):
    """Trains mpmodules' own layers under a policy."""
    layers = [nn.Dense(64), nn.LayerNorm(), nn.relu, nn.Dense(64), nn.relu, nn.Dense(OUT)]
    tx = policy.mixed_precision(optax.adamw(1e-3), text, **options)
    with policy.use_policy(text):
        model = nn.Sequential(layers)
        params = model.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))["params"]
        step = step_of(lambda params, x: model.apply({"params": params}, x), tx, text)
        return watch(step, (params, tx.init(params)), batches())


@clean
def layers_in_float8():
    return layers_of("mixed_float8")


@clean
def layers_in_int8():
    return layers_of("mixed_int8")


@clean
def layers_in_float16():
    return layers_of("mixed_float16", **DYNAMIC)


@clean
def frozen_params():
    labels = {"up": "base", "out": "base", "head": "head"}
    tx = optax.multi_transform({"head": optax.adam(1e-2), "base": optax.set_to_zero()}, labels)
    return plain(jnp.tanh, batches(), dtype=F32, tx=tx)


@clean
def a_branch_that_starts_at_0():
    def change(params):
        params["layer_0"]["out"]["kernel"] *= 0
        return params

    return linen(jnp.tanh, batches(), dtype=BF16, change=change)


@clean
def restarts_of_the_learning_rate():
    schedule = optax.sgdr_schedule(
        [{"init_value": 1e-4, "peak_value": 1e-2, "warmup_steps": 2, "decay_steps": 8}] * 3
    )
    return nnx_run(rms_norm, batches(24), dtype=BF16, tx=optax.sgd(schedule))


@clean
def batches_of_different_sizes_of_numbers():
    rng = np.random.default_rng(1)
    scales = {f"at_{i}": times(float(rng.lognormal(0, 0.4))) for i in range(24)}
    return plain(rms_norm, batches(24, **scales), dtype=BF16)
