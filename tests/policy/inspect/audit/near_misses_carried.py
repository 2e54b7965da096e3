"""More near misses: what loops and calls carry, and ranges and casts of half values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx
from jax import lax

import policy
from mpmodules import linen as nn
from mpmodules import nnx
from tests.policy.inspect.audit.near_misses import (
    BF16,
    F16,
    F32,
    H,
    W,
    X,
    near_miss,
    near_miss_made,
    product,
    shape,
)

# --------------------------------------------------------------------------------------------------
# Carries
# --------------------------------------------------------------------------------------------------


@near_miss("attention block by block with float32 sums", W, X, forward_only=True)
def _attention_block_by_block_with_float32_sums(params, x):
    def step(state, key):
        largest, total, out = state
        logits = (x @ key).astype(F32)
        new = jnp.maximum(largest, logits)
        scale, weight = jnp.exp(largest - new), jnp.exp(logits - new)
        return (
            new,
            total * scale + weight,
            out * scale[:, None] + weight[:, None] * key.astype(F32)[None],
        ), None

    first = (jnp.full(4, -jnp.inf), jnp.zeros(4), jnp.zeros((4, 4)))
    (_, total, out), _ = lax.scan(step, first, product(params, x))
    return (out / total[:, None]).astype(BF16)


@near_miss("layers that keep what they return", W, X)
def _layers_that_keep_what_they_return(params, x):
    def layer(state, _):
        x, kept, at = state
        x = x + jnp.tanh(product(params, x))
        return (x, kept.at[at].set(x[0]), at + 1), None

    return lax.scan(layer, (x, jnp.zeros((3, 4), BF16), 0), None, length=3)[0][1]


@near_miss("layers that may be skipped", W, X)
def _layers_that_may_be_skipped(params, x):
    def layer(x, _):
        return lax.cond(
            x[0, 0] > 0, lambda x: x + jnp.tanh(product(params, x)), lambda x: x, x
        ), None

    return lax.scan(layer, x, None, length=3)[0]


@near_miss("layers whose inputs swap places", W, X)
def _layers_whose_inputs_swap_places(params, x):
    def layer(state, _):
        first, second = state
        return (second, first + jnp.tanh(product(params, second + jnp.tanh(first)))), None

    return lax.scan(layer, (x, x), None, length=3)[0][0]


@near_miss("two buffers that swap places", W, X)
def _two_buffers_that_swap_places(params, x):
    return lax.scan(
        lambda s, _: ((jnp.tanh(product(params, s[1])), s[0]), None), (x, x), None, length=3
    )[0][0]


@near_miss("a sum that compensates for its losses", W, X, forward_only=True)
def _a_sum_that_compensates_for_its_losses(params, x):
    def add(state, row):
        total, lost = state
        term = row - lost
        new = total + term
        return (new, (new - total) - term), None

    return lax.scan(add, (jnp.zeros(4, BF16), jnp.zeros(4, BF16)), product(params, x))[0][0]


# --------------------------------------------------------------------------------------------------
# Ranges and casts
# --------------------------------------------------------------------------------------------------


@near_miss("attention logits in float16", W, H)
def _attention_logits_in_float16(params, x):
    q, k = jnp.split(product(params, x), 2, -1)
    return product(params, jax.nn.softmax((q @ k.T / 2).astype(F32)).astype(F16), 1)


@near_miss("a norm by a dot with a float32 result", W, H, forward_only=True)
def _a_norm_by_a_dot_with_a_float32_result(params, x):
    h = product(params, x)
    square = jnp.einsum("bd,bd->b", h, h, preferred_element_type=F32)
    return product(params, (h.astype(F32) * lax.rsqrt(square + 1e-3)[:, None]).astype(F16), 1)


@near_miss_made
def _float16_that_is_handed_to_bfloat16():
    def first(params, x):
        return (product(params, x).astype(F32) * 2).astype(F16)

    def second(params, x):
        return product(params, jnp.tanh(x.astype(BF16)), 1)

    return lambda params, x: second(params, first(params, x)), (W, H)


@near_miss("a scaled cast to 8 bits", W, shape(4, 4))
def _a_scaled_cast_to_8_bits(params, x):
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    scale = 448.0 / 16
    narrow = jnp.clip(x * scale, -limit, limit).astype(jnp.float8_e4m3fn)
    return product(params, narrow.astype(BF16)).astype(F32) / scale


@near_miss_made
def _a_step_that_mixed_precision_takes():
    tx = policy.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")

    def fn(params, state, x):
        grads = jax.grad(lambda params: jnp.tanh(product(params, x)).astype(F32).mean())(params)
        params, state, _ = policy.apply_gradients(tx, params, state, grads)
        return params, state

    return fn, (W, jax.eval_shape(tx.init, W), X)


@near_miss_made
def _running_statistics_of_linen():
    model = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False)])
    with policy.use_policy("mixed_bfloat16"):
        variables = jax.eval_shape(model.init, jax.random.key(0), shape(4, 4))

    def fn(variables, x):
        with policy.use_policy("mixed_bfloat16"):
            return model.apply(variables, x, mutable=["batch_stats"])

    return fn, (variables, shape(4, 4))


@near_miss_made
def _running_statistics_of_nnx():
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = flax_nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.dense(x))

    with policy.use_policy("bfloat16"):
        return flax_nnx.eval_shape(Model), (X,)
