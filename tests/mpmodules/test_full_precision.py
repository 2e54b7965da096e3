"""Islands: compute is reduction_dtype inside, in layers of both wings and under autocast."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policy
from mpmodules import full_precision, linen, nnx
from policy import autocast, use_policy
from tests.programs import named, operations

X = jnp.ones((2, 4))


def dots(fn: Any, *args: Any) -> list[tuple[str, ...]]:
    return [op.inputs for op in named(operations(fn, *args), "dot_general")]


@full_precision
def doubled(x: jax.Array, layer: Any, note: Any) -> jax.Array:
    note("argument", x)
    return layer(x) + layer(x)


class LinenIsland(linen.Module):
    note: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        with full_precision():
            self.note("block", self.param("w", linen.initializers.ones, (4, 4)))
            self.note("layer", linen.Dense(4, name="a")(x))
            self.note("half layer", linen.Dense(4, dtype_policy="bfloat16")(x))
            self.note("accessor", policy.compute_dtype())
        y = doubled(x, linen.Dense(4, name="b"), self.note)
        self.note("function", y)
        return linen.Dense(4)(y)


class NnxIsland(nnx.Module):
    def __init__(self, note: Any, rngs: nnx.Rngs) -> None:
        self.note, self.w, self.norm = (
            note,
            nnx.Param(jnp.ones((4, 4))),
            nnx.LayerNorm(4, rngs=rngs),
        )
        self.a, self.b, self.c = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
        self.half = nnx.Linear(4, 4, rngs=rngs, dtype_policy="bfloat16")

    def __call__(self, x: jax.Array) -> jax.Array:
        with full_precision():
            self.note("block", self.w[...])
            self.note("layer", self.a(x))
            self.note("half layer", self.half(x))
            self.note("accessor", policy.compute_dtype())
            self.note("norm", self.norm(x))
        y = doubled(x, self.b, self.note)
        self.note("function", y)
        return self.c(y)


INSIDE = ("block", "layer", "half layer", "accessor", "norm", "argument")


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_layers_parameters_and_accessors_are_float32_inside_and_half_outside(wing: str) -> None:
    seen: dict[str, str] = {}

    def note(name: str, value: Any) -> None:
        seen[name] = str(jnp.dtype(getattr(value, "dtype", value)))

    if wing == "linen":
        model = LinenIsland(note, dtype_policy="mixed_bfloat16")
        variables = model.init(jax.random.key(0), X)
        found = dots(model.apply, variables, X)
    else:
        model = NnxIsland(note, nnx.Rngs(0), dtype_policy="mixed_bfloat16")
        found = dots(lambda x: model(x), X)
    assert {name: dtype for name, dtype in seen.items() if name in INSIDE} == {
        name: "float32" for name in INSIDE if name in seen
    }
    assert len(seen) >= 6 and seen["function"] == "float32"  # as own code is
    assert found == [("float32",) * 2] * 4 + [("bfloat16",) * 2]


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_an_audit_knows_that_an_island_was_asked_for(wing: str) -> None:
    if wing == "linen":
        model = LinenIsland(lambda *_: None, dtype_policy="mixed_bfloat16")
        report = policy.audit(model.apply, model.init(jax.random.key(0), X), X, backward=True)
    else:
        report = policy.audit(
            NnxIsland(lambda *_: None, nnx.Rngs(0), dtype_policy="mixed_bfloat16"), X, backward=True
        )
    assert report.findings == ()


def test_without_a_policy_nothing_is_cast() -> None:
    half = jnp.ones((2, 4), jnp.bfloat16)
    assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
    with full_precision():
        assert policy.compute_dtype() is None
    with use_policy("mixed_bfloat16"):  # no module's call is open: functions are no boundaries
        assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
        with full_precision():
            assert policy.compute_dtype() == policy.output_dtype() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


@pytest.mark.parametrize("scope", [None, "mixed_bfloat16"])
def test_autocast_keeps_blocks_and_functions_in_float32(scope: str | None) -> None:
    def model(x: jax.Array) -> jax.Array:
        y = full_precision(lambda x: x @ x)(x)
        with full_precision():
            z = x @ x
        return y @ z

    with use_policy(scope):
        found = dots(autocast(model, "mixed_bfloat16"), jnp.ones((4, 4)))
    assert found == [("float32",) * 2] * 2 + [("bfloat16",) * 2]


def test_a_block_is_a_decorator_too_and_may_be_entered_again() -> None:
    block = full_precision()

    @block
    def inside() -> Any:
        with block:
            return policy.compute_dtype()

    with use_policy("mixed_bfloat16"):
        assert inside() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


def test_a_jitted_function_is_traced_for_each_side_of_an_island() -> None:
    jitted = jax.jit(lambda x: x.astype(policy.compute_dtype()))
    with use_policy("mixed_bfloat16"):
        assert jitted(X).dtype == jnp.bfloat16
        with full_precision():
            assert jitted(X).dtype == jnp.float32


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="full_precision takes a function, but got 3 of type int"):
        full_precision(3)
