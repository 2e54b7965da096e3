"""Sums in half precision, written as sums or as additions."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from policy.inspect.audit.finding_kinds import CARRY, REDUCTION
from tests.policy.inspect.audit.corpus.functions import W, X, product
from tests.policy.inspect.audit.corpus.planting import BF16, F16, F32, I32, clean, faults, shape

ZERO, ONE = np.zeros((), BF16), np.ones((), BF16)
INDICES = shape(4, dtype=I32)

faults(REDUCTION, "reduce_window_sum")(
    {
        "an average pool": lambda x: (
            lax.reduce_window(x, ZERO, lax.add, (2, 2), (1, 1), "VALID") / 4
        ),
        "an average pool of Flax's": lambda x: nn.avg_pool(x[None, :, :, None], (2, 2), (2, 2)),
    }
)
faults(REDUCTION, "cumsum")(
    {
        "a cumulative sum": lambda x: lax.cumsum(x, 1),
        "a cumulative sum of jnp's": lambda x: jnp.cumsum(x, -1),
        "cumulative log decays": lambda x: jnp.tanh(jnp.cumsum(x, 0)) @ x,
    }
)
faults(REDUCTION, "cumprod")({"a cumulative product": lambda x: jnp.cumprod(x, -1)})
faults(REDUCTION, "cumlogsumexp")({"a cumulative logsumexp": lax.cumlogsumexp})
faults(REDUCTION, "reduce_sum")(
    {
        "a sum of lax": lambda x: lax.reduce(x, ZERO, lax.add, (1,)),
        "the gradient of a scale": lambda x: jax.grad(lambda g: (x * g).astype(F32).sum())(x[0]),
        "the gradient of repeated rows": lambda x: jax.grad(
            lambda x: jnp.tanh(jnp.repeat(x, 4, 0)).astype(F32).sum()
        )(x),
        "the gradient of shared keys": lambda x: jax.grad(
            lambda x: jnp.tanh(jnp.broadcast_to(x[:, None], (4, 6, 4))).astype(F32).sum()
        )(x),
    }
)
faults(REDUCTION, "reduce_prod")({"a product of lax": lambda x: lax.reduce(x, ONE, lax.mul, (1,))})
faults(REDUCTION, "reduce")(
    {"a sum by a function": lambda x: lax.reduce(x, ZERO, lambda a, b: a + b * 1, (1,))}
)
faults(REDUCTION, "psum")(
    {
        "a mean over a mapped axis": lambda x: jax.vmap(
            lambda row: lax.pmean(row, "i"), axis_name="i"
        )(x)
    }
)
faults(REDUCTION, "scatter-add", X, INDICES)(
    {
        "sums of segments": lambda x, i: jax.ops.segment_sum(x, i, 3),
        "a weighted histogram": lambda x, i: jnp.bincount(i, weights=x[:, 0], length=5),
        "rows that are added": lambda x, i: jnp.zeros_like(x).at[i].add(x),
        "a histogram in half": lambda x, i: jnp.zeros(5, x.dtype).at[i].add(1),
    }
)
faults(REDUCTION, "scatter-mul", X, INDICES)(
    {"rows that are multiplied": lambda x, i: jnp.ones_like(x).at[i].multiply(x)}
)


@faults(REDUCTION, "scatter-add", backward=True)
def _the_gradient_of_a_lookup(table):
    tokens = jnp.zeros((2, 3), I32) + jnp.argmax(table[0]).astype(I32)
    return jnp.tanh(table[tokens])


faults(REDUCTION, "scatter-add", backward=True)(
    {
        "the gradient of the largest numbers": lambda x: jnp.tanh(lax.top_k(x, 2)[0]),
        "the gradient of a lookup along an axis": lambda x: jnp.tanh(
            jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True) * jnp.ones((1, 3), I32), -1)
        ),
    }
)
faults(REDUCTION, "reduce_sum", backward=True)(
    {"the gradient of a bias": lambda x: jnp.tanh(x[:1] + jnp.zeros((8, 4), BF16)) * 0.5}
)
faults(REDUCTION, "select_and_scatter_add", shape(8, 8), backward=True)(
    {
        "the gradient of a max pool that overlaps": lambda x: nn.max_pool(
            x[None, :, :, None], (4, 4), (1, 1)
        )
    }
)

# --------------------------------------------------------------------------------------------------
# Additions
# --------------------------------------------------------------------------------------------------

faults(REDUCTION, "add")(
    {
        "a scan of pairs that adds": lambda x: lax.associative_scan(jnp.add, x),
        "a linear recurrence by a scan of pairs": lambda x: lax.associative_scan(
            lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]), (x, x + 1)
        )[1],
        "a chain of additions": lambda x: functools.reduce(jnp.add, [x[i] for i in range(4)]),
        "squares of rows that are added up": lambda x: sum(x[i] * x[i] for i in range(4)),
        "eight terms that are added up": lambda x: sum(jnp.tanh(x * i) for i in range(1, 9)),
        "losses that are added up": lambda x: sum(jnp.tanh(x * i).mean() for i in range(1, 10)),
        "a dot product by hand": lambda x: sum(x.ravel()[i] * x.ravel()[-i] for i in range(8)),
    }
)
faults(REDUCTION, "add", *[shape(4)] * 9)({"a sum of nine arrays": lambda *xs: sum(xs)})
faults(REDUCTION, "add", F16)(
    {
        "a sum of Python's": lambda x: sum(x) / 4,
        "corners that are added up": lambda x: (
            (x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4
        ),
    }
)
faults(REDUCTION, "sub")({"an alternating chain": lambda x: x[0] + x[1] - x[2] - x[3]})


@faults(REDUCTION, "add")
def _a_tree_of_additions(x):
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


@faults(REDUCTION, "add")
def _prefix_sums_by_doubling(x):
    for distance in (1, 2):
        x = x + jnp.pad(x[:-distance], ((distance, 0), (0, 0)))
    return x


# --------------------------------------------------------------------------------------------------
# Rings of four devices
# --------------------------------------------------------------------------------------------------

ON_DEVICES = ("vmap", "while", "cond", "shard_map", "custom", "a gradient", "step", "linen", "nnx")
ONWARD = [(i, (i + 1) % 4) for i in range(4)]


def on_four_devices(local: Any) -> Any:
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _all_reduce(x: Any) -> Any:
    total = passed = x
    for _ in range(3):
        passed = lax.ppermute(passed, "i", ONWARD)
        total = total + passed
    return total


def _reduce_scatter(x: Any, function: Any = lambda x: x) -> Any:
    total = function(x[:1])
    for row in range(1, 4):
        total = lax.ppermute(total, "i", ONWARD) + function(x[row : row + 1])
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


for _kind, _primitive, _rings in (
    (
        REDUCTION,
        "add",
        {
            "an all-reduce": _all_reduce,
            "a reduce-scatter": _reduce_scatter,
            "a reduce-scatter of what is computed": lambda x: _reduce_scatter(x, jnp.tanh),
            "an all-reduce by doubling": _by_doubling,
        },
    ),
    (
        CARRY,
        "scan",
        {
            "an all-reduce in a loop": _in_a_loop,
            "a sum that a loop passes on": _passed_on_in_a_loop,
        },
    ),
    (REDUCTION, "psum", {"a sum over devices": lambda x: lax.psum(x, "i")}),
    (
        REDUCTION,
        "reduce_scatter",
        {"a sum over devices that is scattered": lambda x: lax.psum_scatter(x, "i", tiled=True)},
    ),
):
    faults(_kind, _primitive, shape(16, 4), never=ON_DEVICES)(
        {name: on_four_devices(local) for name, local in _rings.items()}
    )

# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------


def layer(w: Any, x: Any, i: int) -> Any:
    return jnp.tanh(product(w, x, i))


clean(W, X)(
    {
        "a sum in float32": lambda w, x: product(w, x).astype(F32).sum(-1),
        "a cumulative sum in float32": lambda w, x: lax.cumsum(product(w, x).astype(F32), 1).astype(
            x.dtype
        ),
        "a mean over devices in float32": lambda w, x: jax.vmap(
            lambda row: lax.pmean(row.astype(F32), "i"), axis_name="i"
        )(product(w, x)),
        "rows that are set": lambda w, x: x.at[jnp.arange(2)].set(product(w, x)[:2]),
        "rows that are added to places of their own": lambda w, x: x.at[jnp.arange(3)].add(
            product(w, x)[:3]
        ),
        "a largest number": lambda w, x: lax.reduce_window(
            product(w, x), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"
        ),
    }
)
clean(W, X)(
    {
        "embeddings of three kinds": lambda w, x: (
            (w[1].astype(BF16) + w[2].astype(BF16) + x) @ w[0].astype(BF16)
        ),
        "a mean of two heads": lambda w, x: (layer(w, x, 0) + layer(w, x, 1)) / 2,
    }
)


@clean(W, X)
def _a_stack_of_residual_blocks(w, x):
    for i in range(12):
        x = x + layer(w, x, i)
    return x


@clean(W, X)
def _parallel_branches_of_a_block(w, x):
    for i in range(4):
        x = x + layer(w, x, i) + jax.nn.gelu(product(w, x, i + 4))
    return x


@clean(W, X)
def _a_convolution_with_three_taps(w, x):
    h = jnp.pad(product(w, x), ((1, 1), (0, 0)))
    return h[:-2] + h[1:-1] + h[2:]


@clean(W, X, backward=False)
def _a_mixture_of_four_experts(w, x):
    gates = jax.nn.softmax(product(w, x).astype(F32)).astype(BF16)
    return sum(gates[:, i, None] * layer(w, x, i + 1) for i in range(4))


@clean(W, X)
def _neighbours_of_a_ring(w, x):
    def local(h):
        left = lax.ppermute(h, "i", ONWARD)
        right = lax.ppermute(h, "i", [(j, i) for i, j in ONWARD])
        return (left + h + right) / 3

    return on_four_devices(local)(product(w, x))
