"""Sums that loops carry in half precision."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import CARRY
from tests.policy.inspect.audit.corpus.functions import W, X, product
from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    F16,
    F32,
    I32,
    REVERSES,
    clean,
    faults,
)


def zeros(x: Any) -> Any:
    return jnp.zeros(x.shape[1:], x.dtype)


def summed(add: Any, x: Any, first: Any = zeros) -> Any:
    """The result of a scan whose body returns the next carry alone."""
    return lax.scan(lambda carry, row: (add(carry, row), None), first(x), x)[0]


faults(CARRY, "scan")(
    {
        "a sum that a scan carries": lambda x: summed(jnp.add, x),
        "an average that a scan carries": lambda x: summed(lambda c, row: 0.9 * c + 0.1 * row, x),
        "a product that a scan carries where it is not skipped": lambda x: summed(
            lambda total, row: jnp.where(row > 0, total * row, total),
            x,
            lambda x: jnp.ones(4, BF16),
        ),
        "a sum in one branch of a conditional": lambda x: summed(
            lambda c, row: lax.cond(row[0] > 0, lambda c: c + row, lambda c: c, c), x
        ),
        "a score of beams": lambda x: summed(
            lambda c, row: c + jnp.max(row), x, lambda x: jnp.zeros((), x.dtype)
        ),
        "a linear recurrence": lambda x: summed(lambda h, row: jnp.tanh(row) * h + row, x),
        "a discretised state space": lambda x: summed(lambda h, row: jnp.exp(row) * h + row, x),
        "sums that swap places": lambda x: summed(
            lambda sums, row: (sums[1] + row, sums[0]), x, lambda x: (zeros(x), zeros(x))
        )[0],
        "sums that are set in their places": lambda x: lax.fori_loop(
            0, 4, lambda i, c: c.at[i % 2].set(c[i % 2] + x[i]), jnp.zeros_like(x)
        ),
        "places that a function adds to": lambda x: lax.fori_loop(
            0, 4, lambda i, c: c.at[i % 2].apply(lambda count: count + 1), x
        ),
        "a slice that is updated with its sum": lambda x: lax.fori_loop(
            0,
            4,
            lambda i, c: lax.dynamic_update_slice(
                c, lax.dynamic_slice(c, (0, 0), (1, 4)) + x[i][None], (0, 0)
            ),
            jnp.zeros_like(x),
        ),
        "a counter": lambda x: lax.fori_loop(0, 1000, lambda i, c: c + 1, x[0, 0]),
        "steps of Euler's": lambda x: lax.fori_loop(0, 100, lambda i, y: y + 0.01 * x, x),
        "steps of Euler's by a function of the state": lambda x: lax.fori_loop(
            0, 100, lambda i, y: y + 0.01 * jnp.tanh(y), x
        ),
    }
)
faults(CARRY, "scan", F32)(
    {
        "a sum that a loop rounds": lambda x: lax.fori_loop(
            0, 4, lambda i, c: (c.astype(F32) + x[i]).astype(BF16), jnp.zeros(4, BF16)
        )
    }
)
faults(CARRY, "while", F16, never=REVERSES)(
    {
        "an average that a while loop carries": lambda x: lax.while_loop(
            lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] * 0.9 + x[s[0]] * 0.1), (0, x[0])
        )[1],
        "a time that a while loop carries": lambda x: lax.while_loop(
            lambda s: s[0] < 1, lambda s: (s[0] + 0.001, jnp.tanh(s[1])), (x[0, 0], x)
        )[1],
        "a sum in one of three branches": lambda x: lax.while_loop(
            lambda s: s[0] < 4,
            lambda s: (
                s[0] + 1,
                lax.switch(
                    s[0] % 3, [lambda c: c + x[s[0]], lambda c: c - x[s[0]], lambda c: c], s[1]
                ),
            ),
            (0, zeros(x)),
        )[1],
    }
)


@faults(CARRY, "scan")
def _a_running_mean_that_a_scan_carries(x):
    def step(state, row):
        count, mean = state
        return count + 1, mean + (row - mean) / (count + 1).astype(BF16)

    return summed(step, x, lambda x: (jnp.int32(0), zeros(x)))[1]


@faults(CARRY, "scan", F16)
def _a_histogram_that_is_set_where_its_numbers_are(x):
    def add(counts, row):
        places = row.astype(I32) % 4
        return counts.at[places].set(counts[places] + 1)

    return summed(add, x)


def _online_softmax(x, logits_of, dtype):
    def step(state, row):
        largest, total, out = state
        logits = logits_of(row).astype(dtype)
        new = jnp.maximum(largest, logits)
        scale, weight = jnp.exp(largest - new), jnp.exp(logits - new)
        out = out * scale[:, None] + weight[:, None] * row.astype(dtype)
        return new, total * scale + weight, out

    first = (jnp.full(4, -jnp.inf, dtype), jnp.zeros(4, dtype), jnp.zeros((4, 4), dtype))
    _, total, out = summed(step, x, lambda _: first)
    return out / total[:, None]


faults(CARRY, "scan")(
    {"a softmax that is computed row by row": lambda x: _online_softmax(x, lambda row: row, BF16)}
)
faults(CARRY, "scan", F16, F16)(
    {"attention block by block": lambda q, k: _online_softmax(k, lambda row: q @ row, F16)}
)


def _gradient(w, row):
    return jax.grad(lambda w: jnp.tanh((row[None] @ w).astype(F32)).sum())(w)


faults(CARRY, "scan", X, X)(
    {
        "gradients that are accumulated": lambda w, x: summed(
            lambda total, row: jax.tree.map(jnp.add, total, _gradient(w, row)),
            x,
            lambda _: jnp.zeros_like(w),
        ),
        "parameters that a loop of steps subtracts gradients from": lambda w, x: summed(
            lambda w, row: w - 0.1 * (_gradient(w, row) + 0.01 * w), x, lambda _: w
        ),
    }
)

# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------


def layers(body: Any, first: Any) -> Any:
    return lax.scan(lambda carry, _: (body(carry), None), first, None, length=3)[0]


clean(W, X)(
    {
        "layers that may be skipped": lambda w, x: layers(
            lambda x: lax.cond(x[0, 0] > 0, lambda x: x + jnp.tanh(product(w, x)), lambda x: x, x),
            x,
        ),
        "layers whose inputs swap places": lambda w, x: layers(
            lambda s: (s[1], s[0] + jnp.tanh(product(w, s[1] + jnp.tanh(s[0])))), (x, x)
        )[0],
        "two buffers that swap places": lambda w, x: layers(
            lambda s: (jnp.tanh(product(w, s[1])), s[0]), (x, x)
        )[0],
        "layers that keep what they return": lambda w, x: layers(
            functools.partial(_kept, w), (x, jnp.zeros((3, 4), BF16), 0)
        )[1],
        "a gated recurrence": lambda w, x: summed(
            lambda h, row: _gated(w, h[None], row[None])[0], x
        ),
        "a sum that a scan carries in float32": lambda w, x: summed(
            lambda c, row: c + row.astype(F32), product(w, x), lambda _: jnp.zeros(4)
        ),
        "a running maximum": lambda w, x: summed(jnp.maximum, product(w, x)),
        "a recurrence that a matmul feeds back": lambda w, x: summed(
            lambda h, row: jnp.tanh(product(w, h[None])[0] + row), x
        ),
    }
)
clean(W, X, backward=False)(
    {
        "attention block by block with float32 sums": lambda w, x: _online_softmax(
            product(w, x), lambda row: x @ row, F32
        ).astype(BF16),
        "a sum that compensates for its losses": lambda w, x: summed(
            _compensated, product(w, x), lambda x: (zeros(x), zeros(x))
        )[0],
    }
)


def _kept(w, state):
    x, kept, at = state
    x = x + jnp.tanh(product(w, x))
    return x, kept.at[at].set(x[0]), at + 1


def _gated(w, h, x):
    gate = jax.nn.sigmoid(product(w, x + h))
    return (1 - gate) * jnp.tanh(product(w, x)) + gate * h


def _compensated(state, row):
    total, lost = state
    term = row - lost
    new = total + term
    return new, (new - total) - term
