"""Faults that make a step NaN or infinite: in the model, its gradients, the optimizer, the data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.inspect.runs.advice_kinds import BATCH, DIVISION, NOT_FINITE, OVERFLOW
from tests.policy.inspect.runs.corpus.training import (
    BF16,
    F16,
    F32,
    WIDTH,
    batches,
    fault,
    linen,
    nnx_run,
    plain,
    rows_set,
    squared,
    times,
)

INNER = "inner"

# --------------------------------------------------------------------------------------------------
# Float16: divisions
# --------------------------------------------------------------------------------------------------


def root_mean_square(h):
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-8)


@fault(DIVISION, INNER, 6, "jax.lax.rsqrt(jnp.mean")
def an_epsilon_of_1e_8_meets_an_example_of_zeros():
    return linen(root_mean_square, batches(at_6=rows_set(0.0, 3)))


@fault(DIVISION, INNER, 4, "jax.lax.rsqrt(jnp.mean")
def an_epsilon_of_1e_8_in_nnx():
    return nnx_run(root_mean_square, batches(at_4=rows_set(0.0, 0, 1)))


@fault(DIVISION, INNER, 5, "jax.lax.rsqrt(jnp.mean", layer=0)
def an_epsilon_of_1e_8_in_a_stack_of_layers():
    return linen(root_mean_square, batches(at_5=rows_set(0.0, 2)), scan=True)


def standardise(h):
    centred = h - h.mean(-1, keepdims=True)
    return centred / (jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True)) + 1e-9)


@fault(DIVISION, INNER, 7, "return centred /")
def a_padded_example_has_no_deviation():
    return plain(standardise, batches(at_7=rows_set(0.0, 5)))


def cross_entropy(h):
    p = jax.nn.softmax(h, -1)
    return -p * jnp.log(p)


@fault(DIVISION, INNER, 6, "return -p * jnp.log(p)")
def the_logarithm_of_a_probability_that_underflows():
    return linen(cross_entropy, batches(at_6=times(40.0)))


def share_of_positive(h):
    positive = jnp.maximum(h, 0)
    return positive / positive.sum(-1, keepdims=True)


@fault(DIVISION, INNER, 3, "return positive /")
def weights_that_are_all_zero_are_normalised():
    return nnx_run(share_of_positive, batches(at_3=rows_set(0.0, 7)), dtype=BF16)


# --------------------------------------------------------------------------------------------------
# Float16: overflows
# --------------------------------------------------------------------------------------------------


def exponentials(h):
    weights = jnp.exp(h)  # without its largest subtracted
    return weights / weights.sum(-1, keepdims=True)


@fault(OVERFLOW, INNER, 5, "weights = jnp.exp(h)")
def a_softmax_without_its_largest_subtracted():
    return plain(exponentials, batches(at_5=times(30.0)))


@fault(OVERFLOW, INNER, 8, "weights = jnp.exp(h)", layer=0)
def a_softmax_by_hand_in_a_scan():
    return plain(exponentials, batches(at_8=times(30.0)), scan=True)


def squares(h):
    return h * jnp.sqrt(1 / (1 + jnp.mean(h * h, -1, keepdims=True)))


@fault(OVERFLOW, INNER, 5, "jnp.mean(h * h")
def images_that_are_not_normalised_from_one_step_on():
    return linen(squares, batches(from_5=times(600.0)))


@fault(OVERFLOW, INNER, 5, "jnp.mean(h * h", layer=0)
def images_that_are_not_normalised_in_a_scan_of_nnx():
    return nnx_run(squares, batches(from_5=times(600.0)), scan=True)


def attention(h):
    logits = h @ h.swapaxes(-1, -2)  # not divided by the root of the width
    return jax.nn.softmax(logits, -1) @ h


def larger_layer(params):
    """Returns params whose layer 1 of the stack hands on what is 6 times as large."""
    kernel = params["layers"]["out"]["kernel"].at[1].multiply(6.0)
    return {**params, "layers": {"out": {"kernel": kernel}}}


@fault(OVERFLOW, INNER, 6, "logits = h @ h.swapaxes", layer=2)
def attention_logits_overflow_in_layer_2():
    data = batches(at_6=times(10.0))
    return linen(attention, data, scan=True, change=larger_layer, tx=optax.sgd(1e-7))


def total(h):
    return h - jnp.sum(jnp.abs(jnp.repeat(h, 1024, -1)), -1, keepdims=True) / 16384


@fault(OVERFLOW, INNER, 4, "jnp.sum(jnp.abs")
def a_float16_sum_over_a_long_axis():
    return nnx_run(total, batches(from_4=times(8.0)))


def variance_of_log(h):
    return jnp.exp(2 * h) / (1 + jnp.exp(2 * h))


@fault(OVERFLOW, INNER, 9, "return jnp.exp(2 * h)")
def the_exponential_of_a_logarithm_of_variances():
    return linen(variance_of_log, batches(at_9=times(12.0)))


def products(h):
    weights = jnp.cumprod(1 + jnp.abs(h) / 4, -1)
    return weights / weights.sum(-1, keepdims=True)


@fault(OVERFLOW, INNER, 7, "weights = jnp.cumprod")
def a_cumulative_product():
    return plain(products, batches(at_7=times(24.0)))


# --------------------------------------------------------------------------------------------------
# Not finite in any dtype
# --------------------------------------------------------------------------------------------------


def deviation(h):
    return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2)


@fault(f"{NOT_FINITE} {DIVISION}", INNER, 6, "return h / jnp.sqrt(jnp.mean(h * h")
def a_variance_that_cancels_below_0_in_bfloat16():
    def change(params):
        return {**params, "up": {"kernel": jnp.eye(WIDTH)}}

    def offset(x):
        return 1000 + 1e-3 * x + 8 * (np.arange(len(x))[:, None] % 3)

    return linen(deviation, batches(at_6=offset), dtype=BF16, change=change)


def angles(h):
    unit = h / jnp.sqrt(1e-3 + jnp.sum(h * h, -1, keepdims=True))
    return jnp.arccos(1.01 * unit)


@fault(NOT_FINITE, INNER, 5, "return jnp.arccos")
def the_angle_of_a_cosine_above_1():
    def one_hot(x):
        return np.eye(WIDTH)[: len(x)] * 30

    def change(params):
        return {**params, "up": jnp.eye(WIDTH)}

    return plain(angles, batches(at_5=one_hot), dtype=BF16, change=change)


def masked_attention(h):
    is_token = jnp.any(h != 0, -1)  # padding is zeros
    logits = jnp.where(is_token & jnp.zeros_like(is_token).at[0].set(True), h @ h.T, -jnp.inf)
    return jax.nn.softmax(logits, -1) @ h


@fault(NOT_FINITE, INNER, 8, "return jax.nn.softmax(logits")
def a_softmax_of_a_row_that_is_all_masked():
    return nnx_run(masked_attention, batches(at_8=rows_set(0.0, 0)), dtype=BF16)


def length(h):
    return h * jnp.sqrt(jnp.sum(h * h, -1, keepdims=True))


@fault(DIVISION, INNER, 6, "return h * jnp.sqrt(jnp.sum")
def the_gradient_of_a_root_at_0():
    return plain(length, batches(at_6=rows_set(0.0, 2)), dtype=F32)


@fault(DIVISION, INNER, 0, "return jnp.where(h > 0, jnp.log(h), 0)")
def the_gradient_of_a_logarithm_that_is_not_chosen():
    def logarithm(h):
        h = jnp.maximum(h, 0)
        return jnp.where(h > 0, jnp.log(h), 0)

    return linen(logarithm, batches(), dtype=F32)


# --------------------------------------------------------------------------------------------------
# The optimizer and the data
# --------------------------------------------------------------------------------------------------


def small(prediction, y):
    return 1e-3 * squared(prediction, y)


ADAM: dict[str, Any] = {"tx": optax.adam(1e-3), "param_dtype": F16, "loss": small}


@fault(DIVISION, "up or head or out", 0, "tx.update(grads, opt_state, params)")
def adam_in_float16():
    return plain(jnp.tanh, batches(), **ADAM)


@fault(DIVISION, "kernel", 0, "optimizer.update(model, grads)")
def adam_in_float16_in_nnx():
    return nnx_run(jnp.tanh, batches(), **ADAM)


@fault(BATCH, "x or 2 or 0 or ", 7)
def a_batch_with_a_nan():
    return linen(jnp.tanh, batches(at_7=rows_set(np.nan, 3)), dtype=BF16)


@fault(BATCH, "x or 2 or 0 or ", 9)
def a_batch_with_an_infinite_number_in_nnx():
    return nnx_run(jnp.tanh, batches(at_9=rows_set(np.inf, 0)), dtype=F32)
