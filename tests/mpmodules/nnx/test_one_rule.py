"""Transformations of nnx, and traces of repeated calls, under the rule for a user's code."""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from tests.mpmodules.wings import MIXED, WINGS, Text, X, dense, layer_norm, weight
from tests.programs import named, operations

HALF = ("bfloat16", "bfloat16")


def test_calls_without_jit_are_traced_once():
    runs = []

    def call(self, x):
        runs.append(type(x).__name__)
        return self.layer(x) @ self.w

    model = WINGS["nnx"].ours(Text(call, layer=dense(4, 4), w=weight(4, 4)), MIXED).instance
    outs = [model(X) for _ in range(4)]
    assert len(runs) == 1
    np.testing.assert_array_equal(outs[0], outs[-1])
    model(X[:2])
    assert len(runs) == 2
    for _ in range(3):
        flax_nnx.grad(lambda m: m(X).sum())(model)
    assert len(runs) <= 4


class Counter(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.calls = nnx.Linear(4, 4, rngs=rngs), 0

    def __call__(self, x):
        self.calls += 1
        return self.layer(x)


class Outer(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = Counter(rngs=rngs)

    def __call__(self, x):
        return self.inner(self.inner(x))


def test_a_counter_in_python_counts_each_call():
    model, outer = (cls(dtype_policy=MIXED, rngs=nnx.Rngs(0)) for cls in (Counter, Outer))
    for i in range(1, 4):
        model(X)
        outer(X)
        assert (model.calls, outer.inner.calls) == (i, 2 * i)


BLOCK = Text(
    lambda self, x: self.layer(self.norm(x) @ self.w + self.b[None]),
    norm=layer_norm(4),
    layer=dense(4, 4),
    w=weight(4, 4),
    b=weight(4),
)


def stacked(modules: Any, rngs: Any) -> Any:
    make = nnx.vmap(lambda rngs: BLOCK.nnx(modules, rngs), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=3)(make)(rngs)


CARRIED: dict[str, Any] = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
RUNS: dict[str, Any] = {
    "jit": nnx.jit(lambda block, x: block(x)),
    "remat": nnx.remat(lambda block, x: block(x)),
    "scan": nnx.scan(lambda block, x: block(x), **CARRIED),
    "scan of remat": nnx.scan(nnx.remat(lambda block, x: block(x)), **CARRIED),
    "vmap": nnx.vmap(lambda block, x: block(x), in_axes=(0, None), out_axes=0),
}


def around(modules: Any, how: str) -> Any:
    class Around(modules.Module):
        def __init__(self, *, rngs):
            one = how in ("jit", "remat")
            self.blocks = BLOCK.nnx(modules, rngs) if one else stacked(modules, rngs)
            self.position = nnx.Param(jnp.ones((1, 4)))

        def __call__(self, x):
            return RUNS[how](self.blocks, x * 2 + self.position)

    return Around


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_transformations_of_nnx_multiply_in_half_and_sum_gradients_in_float32(way, how, where):
    wide = around(flax_nnx, how)(rngs=nnx.Rngs(0))
    half = (
        around(nnx, how)(rngs=nnx.Rngs(0), dtype_policy=MIXED)
        if way == "ours"
        else nnx.apply_policy(wide, MIXED)
    )
    call = (lambda m, x: m(x)) if where == "inside" else (lambda m, x: RUNS[how](m.blocks, x))
    out, truth = (call(model, X) for model in (half, wide))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))
    graph, params, rest = flax_nnx.split(half, flax_nnx.Param, ...)
    loss = lambda p: call(flax_nnx.merge(graph, p, rest, copy=True), X).sum()  # noqa: E731
    ops = operations(jax.grad(loss), params)
    assert {op.inputs for op in named(ops, "dot_general")} == {HALF}
    assert {op.outputs for op in named(ops, "reduce_sum") if op.is_backward} == {("float32",)}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
