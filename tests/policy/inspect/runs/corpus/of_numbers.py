"""Faults that stay finite: updates, gradients, codes, scales, batches, modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy import DynamicLossScale, NoOpLossScale
from policy.inspect.runs.advice_kinds import (
    BATCH,
    DEAD,
    LOST_CODES,
    NEAR_OVERFLOW,
    NO_UPDATE,
    OVERFLOW,
    SATURATED,
    SCALE,
    SKIPS,
    SPIKE,
    UNDERFLOW,
    VANISHED,
)
from tests.policy.inspect.runs.corpus.training import (
    BF16,
    F16,
    F32,
    batches,
    fault,
    linen,
    nnx_run,
    plain,
    squared,
    times,
)

KERNELS = "up/kernel or head/kernel or out/kernel or up or head or out"
INNER = "inner"
INPUT = "x or 2 or 0"

# --------------------------------------------------------------------------------------------------
# Updates that vanish
# --------------------------------------------------------------------------------------------------

HALF = {"dtype": BF16, "param_dtype": BF16}


@fault(VANISHED, KERNELS, 0)
def bfloat16_params_with_adamw_of_1e_5():
    return linen(jnp.tanh, batches(), tx=optax.adamw(1e-5), **HALF)


@fault(VANISHED, KERNELS, 0)
def bfloat16_params_with_adamw_of_1e_5_in_nnx():
    return nnx_run(jnp.tanh, batches(), tx=optax.adamw(1e-5), **HALF)


@fault(VANISHED, KERNELS, 0)
def bfloat16_params_with_small_steps_of_sgd():
    return plain(jnp.tanh, batches(), tx=optax.sgd(1e-4), **HALF)


@fault(VANISHED, KERNELS, 0)
def no_master_weights():
    options = {"master_weights": "none"}
    return linen(
        jnp.tanh, batches(), tx=optax.adamw(1e-5), text="bfloat16", options=options, **HALF
    )


@fault(VANISHED, "layers/out/kernel", 0)
def bfloat16_params_of_a_stack():
    return linen(jnp.tanh, batches(), tx=optax.adamw(1e-5), scan=True, **HALF)


@fault(VANISHED, KERNELS, 0)
def float16_params_with_small_steps_of_sgd():
    return nnx_run(jnp.tanh, batches(), tx=optax.sgd(1e-4), param_dtype=F16)


@fault(VANISHED, "up", 0)
def an_adapter_in_bfloat16_that_does_not_move():
    labels = {"up": "adapter", "out": "base", "head": "base"}
    tx = optax.multi_transform({"adapter": optax.adam(1e-6), "base": optax.set_to_zero()}, labels)
    return plain(jnp.tanh, batches(), tx=tx, **HALF)


# --------------------------------------------------------------------------------------------------
# Gradients and the loss scale
# --------------------------------------------------------------------------------------------------


def small(prediction, y):
    return 1e-6 * squared(prediction, y)


def tiny(prediction, y):
    return 1e-4 * squared(prediction, y)


def large(prediction, y):
    return 1e6 * squared(prediction, y)


@fault(UNDERFLOW, "head or out or inner or up or layer_0", 0)
def small_float16_gradients_without_a_loss_scale():
    options = {"loss_scale": NoOpLossScale()}
    return linen(jnp.tanh, batches(), text="mixed_float16", options=options, loss=small)


@fault(UNDERFLOW, "head or out or inner or up or layers", 0)
def small_float16_gradients_in_nnx():
    return nnx_run(jnp.tanh, batches(), loss=small)


@fault(UNDERFLOW, "head or out or inner or up", 0)
def small_float16_gradients_by_hand():
    return plain(jnp.tanh, batches(), loss=small)


@fault(f"{DEAD} {UNDERFLOW}", "inner or out or layers", 0)
def gradients_that_vanish_over_a_stack():
    def shrink(h):
        return 2e-3 * h

    return linen(shrink, batches(), loss=small, scan=True)


@fault(f"{SCALE} {OVERFLOW}", "head or out or layer_0 or ", 0)
def a_static_loss_scale_that_is_too_large():
    options = {"loss_scale": 2.0**26}
    return linen(jnp.tanh, batches(), text="mixed_float16", options=options)


@fault(SCALE, "", 2)
def gradients_that_overflow_without_a_loss_scale():
    options = {"loss_scale": DynamicLossScale(4.0)}
    tx, text = optax.sgd(1e-9), "mixed_float16"
    return plain(jnp.tanh, batches(), tx=tx, text=text, options=options, loss=large)


@fault(SCALE, "head or out or inner or up or ", 2)
def a_loss_scale_without_a_minimum():
    options = {"loss_scale": DynamicLossScale(2.0, min_loss_scale=2.0**-20)}
    tx, text = optax.sgd(1e-9), "mixed_float16"
    return nnx_run(jnp.tanh, batches(), tx=tx, text=text, options=options, loss=large)


@fault(SKIPS, "head or out or inner or up or layer_0 or ", 32)
def a_loss_scale_that_doubles_after_two_steps():
    options = {"loss_scale": DynamicLossScale(2.0**15, period=2)}
    return linen(jnp.tanh, batches(steps=70), text="mixed_float16", options=options)


# --------------------------------------------------------------------------------------------------
# Modules, ranges and codes
# --------------------------------------------------------------------------------------------------


@fault(DEAD, INNER, 1)
def a_branch_whose_two_factors_are_zero():
    def change(params):
        params["layer_0"]["out"]["kernel"] *= 0
        return params

    return linen(lambda h: 0 * h, batches(), dtype=F32, change=change)


@fault(DEAD, INNER, 5)
def inputs_that_relus_cut_off_from_one_step_on():
    def change(params):
        return {**params, "up": jnp.eye(len(params["up"]))}

    data = batches(from_5=lambda x: -1 - np.abs(x))
    return plain(jax.nn.relu, data, dtype=F32, change=change, tx=optax.sgd(1e-4))


@fault(NEAR_OVERFLOW, f"{INNER} or out or up or layers", 9)
def activations_grow_towards_the_limit_of_float16():
    grow = [lambda x, i=i: x * 1.35**i for i in range(18)]
    data = batches(18, **{f"at_{i}": change for i, change in enumerate(grow)})
    return nnx_run(lambda h: 20 * h, data, tx=optax.sgd(1e-9), loss=tiny)


@fault(SATURATED, f"{INNER} or out/input", 0)
def a_static_scale_of_float8_that_is_too_small():
    def cast(h):
        codes = jnp.clip(h / 1e-3, -448, 448).astype(jnp.float8_e4m3fn)
        return codes.astype(BF16) * 1e-3

    return linen(cast, batches(), dtype=BF16)


def int8_product(h, scale):
    codes = jnp.clip(jnp.round(h / scale), -127, 127).astype(jnp.int8)
    weight = (100 * jnp.eye(h.shape[-1])).astype(jnp.int8)
    product = jax.lax.dot(codes, weight, preferred_element_type=jnp.int32)
    return h + jax.lax.stop_gradient(product.astype(BF16) * (scale / 100) - h)


@fault(SATURATED, f"{INNER}/input", 6)
def a_static_scale_of_int8_that_data_outgrow():
    data = batches(from_6=times(8.0))
    return plain(lambda h: int8_product(h, 0.03), data, dtype=BF16)


@fault(LOST_CODES, f"{INNER}/input", 0)
def a_static_scale_of_int8_that_is_too_large():
    return nnx_run(lambda h: int8_product(h, 100.0), batches(), dtype=BF16)


# --------------------------------------------------------------------------------------------------
# Single steps
# --------------------------------------------------------------------------------------------------


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))


@fault(BATCH, INPUT, 8)
def a_batch_with_one_huge_example():
    return plain(jnp.tanh, batches(at_8=times(1e4, 2)), dtype=F32, tx=CLIPPED)


@fault(BATCH, INPUT, 9)
def one_batch_of_0_to_255():
    return nnx_run(jnp.tanh, batches(at_9=times(255.0)), dtype=BF16, tx=CLIPPED)


@fault(BATCH, INPUT, 7)
def a_huge_example_in_a_scan():
    return linen(jnp.tanh, batches(at_7=times(1e3, 0)), dtype=BF16, scan=True, tx=CLIPPED)


@fault(SPIKE, KERNELS, 8)
def a_learning_rate_that_spikes():
    spike = optax.piecewise_constant_schedule(1e-4, {8: 1e3, 9: 1e-3})
    return linen(jnp.tanh, batches(), dtype=F32, tx=optax.adam(spike))


@fault(NO_UPDATE, "", 0)
def a_schedule_of_whole_numbers_is_0():
    return plain(jnp.tanh, batches(), dtype=F32, tx=optax.sgd(lambda count: 1e-2 * (1 // 1000)))
