"""Ways to keep operations in float32: `full_precision`, `enabled=False`, allow, deny and opaque."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import full_precision, use_policy
from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import BF16, FULLS, HALVES, dots, layer, normal
from tests.policy.autocasting.models import SQUARE as W
from tests.programs import named, operations

X = normal(4, 8)


ISLANDS: dict[str, Any] = {
    "full_precision": full_precision(layer),
    "enabled=False": autocast(layer, BF16, enabled=False),
    "jitted": jax.jit(full_precision(layer)),
    "of what is jitted": full_precision(jax.jit(layer)),
    "checkpointed": jax.checkpoint(full_precision(layer)),
    "of a checkpoint": full_precision(jax.checkpoint(layer)),
    "in a scan": lambda w, x: lax.scan(
        lambda x, _: (full_precision(layer)(w, x), None), x, None, length=2
    )[0],
    "of a scan": full_precision(
        lambda w, x: lax.scan(lambda x, _: (layer(w, x), None), x, None, length=2)[0]
    ),
    "of a branch": full_precision(lambda w, x: lax.cond(x[0, 0] > 0, layer, lambda w, x: x, w, x)),
    "mapped": jax.vmap(full_precision(layer), (None, 0)),
    "of a map": full_precision(jax.vmap(layer, (None, 0))),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_an_island_is_in_float32_forward_and_backward(name):
    def loss(w, x):
        return jnp.sum(layer(w, ISLANDS[name](w, layer(w, x))))

    cast = autocast(loss, BF16)
    programs = {
        "forward": (cast, 1, 2),
        "jit": (jax.jit(cast), 1, 2),
        "grad(autocast)": (jax.grad(cast, (0, 1)), 3, 6),
        "autocast(grad)": (autocast(jax.grad(loss, (0, 1)), BF16), 3, 6),
        "jit(grad(autocast))": (jax.jit(jax.grad(cast, (0, 1))), 3, 6),
    }
    for program, (fn, full, half) in programs.items():
        found = dots(fn, W, X)
        assert found.count(HALVES) == half, program
        # a checkpoint computes its matmul again
        assert full <= found.count(FULLS) == len(found) - half <= full + 1, program


def test_outside_of_autocast_an_island_is_the_function():
    assert dots(full_precision(layer), W, X) == [FULLS]
    assert full_precision(layer).__name__ == "layer"
    with use_policy(BF16):
        assert dots(autocast(layer, enabled=False), W, X) == [FULLS]
        assert dots(autocast(enabled=False)(layer), W, X) == [FULLS]


def test_the_innermost_autocast_decides():
    inner = full_precision(autocast(layer, "mixed_float16"))
    fn = autocast(lambda w, x: inner(w, layer(w, x)), BF16)
    assert dots(fn, W, X) == [HALVES, ("float16", "float16")]


def test_what_an_island_returns_is_kept_in_float32_until_the_next_matmul():
    def fn(w, x):
        h = full_precision(layer)(w, x)
        return jnp.sin(h) * h @ w

    ops = operations(autocast(fn, BF16), W, X)
    assert {op.inputs for op in named(ops, "sin", "mul")} == {("float32",), FULLS}


def test_primitives_are_moved_by_name():
    def fn(w, x):
        return jnp.exp(jnp.tanh(x @ w))

    def dtypes(**options: Any) -> list[str]:
        ops = operations(autocast(fn, BF16, **options), W, X)
        return [named(ops, name)[0].inputs[0] for name in ("dot_general", "tanh", "exp")]

    assert dtypes() == ["bfloat16", "bfloat16", "float32"]
    assert dtypes(allow=["exp"]) == ["bfloat16", "bfloat16", "bfloat16"]
    assert dtypes(deny=["tanh"]) == ["bfloat16", "float32", "float32"]
    assert dtypes(deny=["dot_general"]) == ["float32", "float32", "float32"]
    assert dtypes(opaque=["dot_general", "tanh"]) == ["float32", "float32", "float32"]
    assert dtypes(opaque=["tanh"], allow=["exp"]) == ["bfloat16", "float32", "float32"]


def test_a_bias_widens_activations_in_the_conservative_preset_only():
    def fn(params, x):
        return jnp.tanh(x @ params["w"] + params["b"][None])

    params = {"w": W, "b": jnp.ones(8)}
    for preset, dtype in (("memory", "bfloat16"), ("conservative", "float32")):
        ops = operations(autocast(fn, BF16, preset=preset), params, X)  # type: ignore[arg-type]
        assert [op.inputs for op in named(ops, "dot_general", "tanh")] == [HALVES, (dtype,)]


def test_a_higher_order_primitive_that_is_opaque_runs_as_it_was_traced():
    def fn(w, x):
        return lax.scan(lambda x, _: (layer(w, x), None), x @ w, None, length=2)[0]

    assert dots(autocast(fn, BF16), W, X) == [HALVES, HALVES]
    assert dots(autocast(fn, BF16, opaque=["scan"]), W, X) == [HALVES, FULLS]
