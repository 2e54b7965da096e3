"""Each operation of the table after a matmul: its result, and the gradients of both operands, in
programs of many such branches.

Truth is float64. The bound is the error of the same program in float64 whose matmul rounds its
operands, and their cotangents, to compute_dtype.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmodules import linen, nnx
from policy import autocast, get_policy
from tests.policy.autocasting.single_operations import COLUMNS, OPERATIONS, ROWS, Table

Tree = Any
POLICIES = ("mixed_bfloat16", "mixed_float16")
DRAWS, INNER = 5, 16
FACTOR, ULPS = 4, 4
RANGES = {
    "anywhere": (-2.1, 2.1),
    "positive": (0.3, 3.0),
    "unit": (0.1, 0.9),
    "beyond one": (1.2, 4.0),
    "end": (2.0, 3.6),
    "small": (0.1, 0.3),
}
PLACES = {name: place for place, table in OPERATIONS.values() for name in table}
ALL: Table = {name: fn for _, table in OPERATIONS.values() for name, fn in table.items()}
PARTS = {
    f"{kind} {start}": {name: table[name] for name in list(table)[start : start + 60]}
    for kind, (_, table) in OPERATIONS.items()
    for start in range(0, len(table), 60)
}

# Off where the activation is far at its end: its derivative reads the 16-bit result, which no steep
# function needs in float32. The terms of expm's polynomial overflow in a float16 matmul. 1 - erf(y)
# has 2 y times the relative error of y, a matmul's result in 16 bits, at the end of the range: only
# a float32 result, of twice the bytes, would be closer.
_BOTH = ("mixed_bfloat16", "mixed_float16")
KNOWN: dict[str, tuple[str, ...]] = {
    "nn.sigmoid far": _BOTH,
    "nn.tanh far": _BOTH,
    "minus nn.tanh far": _BOTH,
    "minus nn.gelu far": _BOTH,
    "tanh twice": _BOTH,
    "1-t² of tanh": _BOTH,
    "expm": ("mixed_float16",),
    "1/(1-t) of erf": ("mixed_bfloat16",),
}
IN_FLOAT16 = ("constants", "hinges", "positive", "steep", "linear")
EAGERLY = ("hinges", "orderings", "reductions")
CASES = [
    *(("scan, jit", "mixed_bfloat16", part) for part in PARTS),
    *(("jit", "mixed_float16", part) for part in PARTS if part.startswith(IN_FLOAT16)),
    *(("eager", "mixed_bfloat16", part) for part in PARTS if part.startswith(EAGERLY)),
]
WAYS_OF_ALL = ("jit", "cond", "checkpoint", "vmap", "vmap inside", "linen", "nnx")


def numbers(place: str, rng: np.random.Generator) -> np.ndarray:
    """Returns what a matmul should return: far from ties, and from multiples of a half, where
    kinks are.
    """
    if place == "square":
        root = rng.normal(size=(ROWS, ROWS))
        return np.tile(root @ root.T / 4 + np.diag([4.0, 3.0, 2.0, 1.0]), 2)
    if place == "peaked":
        y = rng.uniform(-0.4, 0.4, (ROWS, COLUMNS))
        y[:, 2] = rng.uniform(6, 7, ROWS)
        return y
    count, (low, high) = ROWS * COLUMNS, RANGES[place]
    steps = np.arange(count) + 0.5 + rng.uniform(-0.2, 0.2, count)
    y = low + (high - low) / count * steps
    beside = 2 * y - np.round(2 * y)
    if place == "anywhere":
        y = y + np.where(np.abs(beside) < 0.08, np.copysign(0.04, beside), 0.0)
    return rng.permutation(y).reshape(ROWS, COLUMNS)


def draws(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights and inputs of an operation, some of each."""
    rng = np.random.default_rng(zlib.crc32(PLACES[name].encode()))
    xs = rng.normal(size=(DRAWS, ROWS, INNER))
    ws = np.stack([np.linalg.pinv(x) @ numbers(PLACES[name], rng) for x in xs])
    return ws.astype(np.float32), xs.astype(np.float32)


def arguments(table: Table) -> tuple[Tree, Tree]:
    drawn = {name: draws(name) for name in table}
    return {name: ws for name, (ws, _) in drawn.items()}, {n: xs for n, (_, xs) in drawn.items()}


def weighted(outs: Tree) -> Any:
    """Returns the sum of all numbers, each times its own weight."""
    rng = np.random.default_rng(7)
    pairs = [(out, rng.uniform(0.5, 1.5, out.shape)) for out in jax.tree.leaves(outs)]
    return sum(jnp.sum(out * weights.astype(out.dtype)) for out, weights in pairs)


def program(table: Table, dot: Callable[..., Any] = jnp.matmul, summed: bool = True) -> Any:
    """Returns a function of dicts of weights and inputs to the results of the table, or to a
    weighted sum of each.
    """
    end = weighted if summed else lambda out: out
    return lambda ws, xs: {name: end(fn(dot(xs[name], ws[name]))) for name, fn in table.items()}


def value_and_grads(run: Any, stacked: bool = False) -> Any:
    """Returns a function to the results, and to the gradients of a sum of them; `stacked` if all
    draws are in one call.
    """
    end = jax.vmap(weighted) if stacked else weighted

    def total(ws: Tree, xs: Tree) -> tuple[Any, Tree]:
        dtype = jax.tree.leaves(ws)[0].dtype
        outs = jax.tree.map(lambda out: out.astype(dtype), run(ws, xs))
        return sum(end(out).sum() for out in outs.values()), outs

    def split(ws: Tree, xs: Tree) -> tuple[Tree, Tree, Tree]:
        (_, outs), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(ws, xs)
        return outs, *grads

    return split


def rounding_dot(dtype: Any) -> Any:
    """Returns a matmul that rounds what it and its backward multiply."""
    bits = jnp.finfo(dtype)

    def rounded(x: Any) -> Any:
        return lax.reduce_precision(x, bits.nexp, bits.nmant)

    dot = jax.custom_vjp(lambda x, w: rounded(x) @ rounded(w))
    dot.defvjp(
        lambda x, w: (rounded(x) @ rounded(w), (rounded(x), rounded(w))),
        lambda saved, g: (rounded(g) @ saved[1].T, saved[0].T @ rounded(g)),
    )
    return dot


@functools.cache
def in_float64(names: tuple[str, ...], summed: bool, dtype: Any = None) -> Tree:
    """Returns results and gradients, of a matmul that rounds to `dtype` if one is given."""
    table = {name: ALL[name] for name in names}
    run = program(table, rounding_dot(dtype) if dtype else jnp.matmul, summed)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments(table))
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(value_and_grads(run)))(*args))


def each(fn: Any) -> Any:
    """Returns a function that calls `fn` for one draw after the other."""

    def call(*args: Tree) -> Tree:
        rows = [fn(*jax.tree.map(lambda x, n=n: x[n], args)) for n in range(DRAWS)]
        return jax.tree.map(lambda *row: np.stack(row), *rows)

    return call


def scanned(run: Any) -> Any:
    return lambda ws, xs: lax.scan(lambda _, row: (None, run(*row)), None, (ws, xs))[1]


def branched(run: Any) -> Any:
    def branch(ws: Tree, xs: Tree) -> Tree:
        is_small = next(iter(ws.values()))[0, 0] < 1e9
        return lax.cond(is_small, run, lambda *a: jax.tree.map(jnp.zeros_like, run(*a)), ws, xs)

    return branch


def linen_module(run: Any, policy: str, ported: bool) -> Any:
    class Own(flax.linen.Module if ported else linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, xs: Tree) -> Tree:
            init = linen.initializers.zeros
            return run({n: self.param(n, init, (INNER, COLUMNS)) for n in xs}, xs)

    model: Any = Own() if ported else Own(dtype_policy=policy)  # type: ignore[call-arg]
    model = linen.apply_policy(model, policy) if ported else model
    return lambda ws, xs: model.apply({"params": ws}, xs)


def nnx_module(run: Any, policy: str, ported: bool) -> Any:
    class Own(flax.nnx.Module if ported else nnx.Module):  # type: ignore[misc]
        def __init__(self, ws: Tree) -> None:
            self.ws = nnx.Dict({name: nnx.Param(w) for name, w in ws.items()})

        def __call__(self, xs: Tree) -> Tree:
            return run({name: w[...] for name, w in self.ws.items()}, xs)

    if ported:
        return lambda ws, xs: nnx.apply_policy(Own(ws), policy)(xs)
    return lambda ws, xs: Own(ws, dtype_policy=policy)(xs)  # type: ignore[call-arg]


Way = Callable[[Any, str], Any]
WAYS: dict[str, Way] = {
    "eager": lambda run, policy: each(value_and_grads(autocast(run, policy))),
    "jit": lambda run, policy: each(jax.jit(value_and_grads(autocast(run, policy)))),
    "scan": lambda run, policy: value_and_grads(autocast(scanned(run), policy), True),
    "scan, jit": lambda run, policy: jax.jit(value_and_grads(autocast(scanned(run), policy), True)),
    "cond": lambda run, policy: each(value_and_grads(autocast(branched(run), policy))),
    "checkpoint": lambda run, policy: each(value_and_grads(autocast(jax.checkpoint(run), policy))),
    "vmap": lambda run, policy: jax.vmap(value_and_grads(autocast(run, policy))),
    "vmap inside": lambda run, policy: value_and_grads(autocast(jax.vmap(run), policy), True),
    "linen": lambda run, policy: each(value_and_grads(linen_module(run, policy, False))),
    "linen port": lambda run, policy: each(value_and_grads(linen_module(run, policy, True))),
    "nnx": lambda run, policy: each(value_and_grads(nnx_module(run, policy, False))),
    "nnx port": lambda run, policy: each(value_and_grads(nnx_module(run, policy, True))),
}


def norms(tree: Tree) -> np.ndarray:
    """Returns the norm of each draw."""
    squares = [np.square(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return np.sqrt(sum(square.reshape(DRAWS, -1).sum(1) for square in squares))


@functools.cache
def faults(names: tuple[str, ...], way: str, policy: str, summed: bool = True) -> dict[str, str]:
    """Returns the operations whose error is beyond the bound, with errors: ours, and those of the
    rounded operands.
    """
    dtype = get_policy(policy).compute_dtype
    table = {name: ALL[name] for name in names}
    found = WAYS[way](program(table, summed=summed), policy)(*arguments(table))
    truths, references = in_float64(names, summed), in_float64(names, summed, dtype)
    texts: dict[str, str] = {}
    for what, ours, reference, truth in zip(
        ("result", "w's gradient", "x's gradient"), found, references, truths, strict=True
    ):
        for name in names:
            size = norms(truth[name])
            if (size < 1e-9).any():
                continue
            off, least = (
                np.median(norms(jax.tree.map(np.subtract, tree[name], truth[name])) / size)
                for tree in (ours, reference)
            )
            lost = ~np.isfinite(norms(ours[name])) | (norms(ours[name]) == 0)
            lost &= np.isfinite(norms(reference[name])) & (norms(reference[name]) > 0)
            if lost.any() or off > max(FACTOR * least, ULPS * float(jnp.finfo(dtype).eps)):
                text = f"{off:.2g}, where only matmuls round {least:.2g}"
                texts[f"{name}: {what}"] = text + ", lost" * int(lost.any())
    return texts


def right(policy: str, names: Any) -> tuple[str, ...]:
    """Returns the names without those that are known to be wrong."""
    return tuple(name for name in names if policy not in KNOWN.get(name, ()))


def test_operations_that_compare_with_a_result_are_right_in_a_loop():
    assert not faults(tuple(OPERATIONS["hinges"][1])[:4], "scan, jit", "mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "policy", "part"), CASES)
def test_an_operation_on_a_matmul_is_as_right_as_the_matmul(way, policy, part):
    assert not faults(right(policy, PARTS[part]), way, policy)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("eager", "jit", "scan, jit")])
def test_operations_that_compare_are_right_in_every_way_of_running(way):
    names = right("mixed_bfloat16", OPERATIONS["hinges"][1])
    assert not faults(names, way, "mixed_bfloat16")


@pytest.mark.cases(slow=6)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS_OF_ALL)
def test_every_operation_is_right_in_every_way_of_running(way, policy, part):
    assert not faults(right(policy, PARTS[part]), way, policy)
