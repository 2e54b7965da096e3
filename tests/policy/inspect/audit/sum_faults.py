"""Sums in half precision that are not written as sums: what loops carry on, and additions one after
another.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import CARRY, REDUCTION
from tests.policy.inspect.audit.faults import BF16, F16, fault


def _row(x: Any) -> Any:
    return jnp.zeros(x.shape[1:], x.dtype)


# --------------------------------------------------------------------------------------------------
# Carries
# --------------------------------------------------------------------------------------------------


@fault("a sum in one branch of a conditional", CARRY, "scan")
def _in_a_branch(x):
    def add(total, row):
        return lax.cond(row[0] > 0, lambda total: total + row, lambda total: total, total), None

    return lax.scan(add, _row(x), x)[0]


@fault("a sum that a while loop adds to in one of three branches", CARRY, "while", F16)
def _in_a_switch(x):
    def add(state):
        i, total = state
        branches = [lambda total: total + x[i], lambda total: total - x[i], lambda total: total]
        return i + 1, lax.switch(i % 3, branches, total)

    return lax.while_loop(lambda state: state[0] < 4, add, (0, _row(x)))[1]


@fault("sums that are set in their places", CARRY, "scan")
def _set_in_places(x):
    def add(i, totals):
        return totals.at[i % 2].set(totals[i % 2] + x[i])

    return lax.fori_loop(0, 4, add, jnp.zeros_like(x))


fault("places that a function adds to", CARRY, "scan")(
    lambda x: lax.fori_loop(
        0, 4, lambda i, counts: counts.at[i % 2].apply(lambda count: count + 1), x
    )
)


@fault("a histogram that is set where its numbers are", CARRY, "scan", F16)
def _histogram(x):
    def add(counts, row):
        places = row.astype(jnp.int32) % 4
        return counts.at[places].set(counts[places] + 1), None

    return lax.scan(add, _row(x), x)[0]


@fault("a slice that is updated with its sum", CARRY, "scan")
def _updated_slice(x):
    def add(i, totals):
        first = lax.dynamic_slice(totals, (0, 0), (1, 4))
        return lax.dynamic_update_slice(totals, first + x[i][None], (0, 0))

    return lax.fori_loop(0, 4, add, jnp.zeros_like(x))


fault("sums that swap places", CARRY, "scan")(
    lambda x: lax.scan(lambda sums, row: ((sums[1] + row, sums[0]), None), (_row(x), _row(x)), x)[
        0
    ][0]
)


@fault("a softmax that is computed row by row", CARRY, "scan")
def _online_softmax(x):
    def step(state, row):
        largest, total, weighted = state
        new = jnp.maximum(largest, row)
        scale, weight = jnp.exp(largest - new), jnp.exp(row - new)
        return (new, total * scale + weight, weighted * scale + weight * row), None

    first = (jnp.full(4, -jnp.inf, x.dtype), _row(x), _row(x))
    (_, total, weighted), _ = lax.scan(step, first, x)
    return weighted / total


@fault("attention that is computed block by block", CARRY, "scan", F16, F16)
def _blockwise_attention(q, k):
    def step(i, state):
        largest, total, out = state
        logits = q @ k[i]
        new = jnp.maximum(largest, logits)
        scale, weight = jnp.exp(largest - new), jnp.exp(logits - new)
        return new, total * scale + weight, out * scale[:, None] + weight[:, None] * k[i][None]

    first = (jnp.full(4, -jnp.inf, F16), jnp.zeros(4, F16), jnp.zeros((4, 4), F16))
    _, total, out = lax.fori_loop(0, 4, step, first)
    return out / total[:, None]


@fault("parameters that a loop of steps subtracts gradients from", CARRY, "scan", BF16, BF16)
def _steps(w, x):
    def step(w, row):
        gradient = jax.grad(lambda w: jnp.tanh((row[None] @ w).astype(jnp.float32)).sum())(w)
        return w - 0.1 * (gradient + 0.01 * w), None

    return lax.scan(step, w, x)[0]


# --------------------------------------------------------------------------------------------------
# Additions
# --------------------------------------------------------------------------------------------------


fault("a scan of pairs that adds", REDUCTION, "add")(lambda x: lax.associative_scan(jnp.add, x))
fault("a chain of additions", REDUCTION, "add")(
    lambda x: functools.reduce(jnp.add, [x[i] for i in range(4)])
)
fault("a sum of Python's", REDUCTION, "add", F16)(lambda x: sum(x) / 4)
fault("an alternating chain", REDUCTION, "sub")(lambda x: x[0] + x[1] - x[2] - x[3])


@fault("a tree of additions", REDUCTION, "add")
def _tree(x):
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@fault("prefix sums by doubling", REDUCTION, "add")
def _doubling(x):
    for shift in (1, 2):
        x = x + jnp.pad(x[:-shift], ((shift, 0), (0, 0)))
    return x


fault("corners that are added up", REDUCTION, "add", F16)(
    lambda x: (x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4
)
fault("squares of rows that are added up", REDUCTION, "add")(
    lambda x: sum(x[i] * x[i] for i in range(4))
)
fault("eight terms that are added up", REDUCTION, "add")(
    lambda x: sum(jnp.tanh(x * i) for i in range(1, 9))
)


# --------------------------------------------------------------------------------------------------
# Rings of four devices, along the axis "i"
# --------------------------------------------------------------------------------------------------

ONWARD = [(i, (i + 1) % 4) for i in range(4)]


def _all_reduce(x: Any) -> Any:
    total = passed = x
    for _ in range(3):
        passed = lax.ppermute(passed, "i", ONWARD)
        total = total + passed
    return total


def _reduce_scatter(x: Any) -> Any:
    total = x[:1]
    for row in range(1, 4):
        total = lax.ppermute(total, "i", ONWARD) + x[row : row + 1]
    return total


def _of_products(x: Any) -> Any:
    total = jnp.tanh(x[:1])
    for row in range(1, 4):
        total = lax.ppermute(total, "i", ONWARD) + jnp.tanh(x[row : row + 1])
    return total


def _by_doubling(x: Any) -> Any:
    for distance in (1, 2):
        x = x + lax.ppermute(x, "i", [(i, i ^ distance) for i in range(4)])
    return x


def _in_a_loop(x: Any) -> Any:
    def turn(_, state):
        total, passed = state
        passed = lax.ppermute(passed, "i", ONWARD)
        return total + passed, passed

    return lax.fori_loop(0, 3, turn, (x, x))[0]


def _passed_on_in_a_loop(x: Any) -> Any:
    return lax.fori_loop(
        0, 4, lambda i, total: lax.ppermute(total, "i", ONWARD) + x[i], jnp.zeros(4, x.dtype)
    )


RINGS: dict[str, tuple[Any, str, str]] = {
    "an all-reduce": (_all_reduce, REDUCTION, "add"),
    "a reduce-scatter": (_reduce_scatter, REDUCTION, "add"),
    "a reduce-scatter of what is computed": (_of_products, REDUCTION, "add"),
    "an all-reduce by doubling": (_by_doubling, REDUCTION, "add"),
    "an all-reduce in a loop": (_in_a_loop, CARRY, "scan"),
    "a sum that a loop passes on": (_passed_on_in_a_loop, CARRY, "scan"),
}
