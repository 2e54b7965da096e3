"""Islands: compute is reduction_dtype inside, in layers of both wings and under autocast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policy
from mpmodules import full_precision
from policy import autocast, use_policy
from tests.mpmodules.wings import BOTH, MIXED, ONES, Text, dense, layer_norm, weight
from tests.programs import named, operations

X = jnp.ones((2, 4))
SEEN: dict[str, str] = {}


def note(name: str, value: Any) -> None:
    SEEN[name] = str(jnp.dtype(getattr(value, "dtype", value)))


@full_precision
def doubled(x: jax.Array, layer: Any) -> jax.Array:
    note("argument", x)
    return layer(x) + layer(x)


def call(self: Any, x: jax.Array) -> jax.Array:
    with full_precision():
        note("block", jnp.asarray(self.w))
        note("layer", self.a(x))
        note("half layer", self.half(x))
        note("accessor", policy.compute_dtype())
        note("norm", self.norm(x))
    y = doubled(x, self.b)
    note("function", y)
    return self.c(y)


ISLAND = Text(
    call,
    w=weight(4, 4, init=ONES),
    norm=layer_norm(4),
    half=dense(4, 4, dtype_policy="bfloat16"),
    **{name: dense(4, 4) for name in "abc"},  # pyright: ignore[reportArgumentType]
)


@BOTH
def test_layers_parameters_and_accessors_are_float32_inside_and_half_outside(wing):
    model = wing.ours(ISLAND, MIXED, X)
    SEEN.clear()
    assert model.dots(X) == [("float32",) * 2] * 4 + [("bfloat16",) * 2]
    inside = ("block", "layer", "half layer", "accessor", "norm", "argument", "function")
    assert dict.fromkeys(inside, "float32") == SEEN  # of a function's result: as own code is
    assert model.audit(X, backward=True).findings == ()  # the island was asked for


def test_without_a_policy_nothing_is_cast():
    half = jnp.ones((2, 4), jnp.bfloat16)
    assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
    with full_precision():
        assert policy.compute_dtype() is None
    with use_policy(MIXED):  # no module's call is open: functions are no boundaries
        assert full_precision(lambda x: x * 2)(half).dtype == jnp.bfloat16
        with full_precision():
            assert policy.compute_dtype() == policy.output_dtype() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


@pytest.mark.parametrize("scope", [None, MIXED])
def test_autocast_keeps_blocks_and_functions_in_float32(scope):
    def model(x: jax.Array) -> jax.Array:
        y = full_precision(lambda x: x @ x)(x)
        with full_precision():
            z = x @ x
        return y @ z

    with use_policy(scope):
        ops = operations(autocast(model, MIXED), jnp.ones((4, 4)))
    found = [op.inputs for op in named(ops, "dot_general")]
    assert found == [("float32",) * 2] * 2 + [("bfloat16",) * 2]


def test_a_block_is_a_decorator_too_and_may_be_entered_again():
    block = full_precision()

    @block
    def inside() -> Any:
        with block:
            return policy.compute_dtype()

    with use_policy(MIXED):
        assert inside() == jnp.float32
        assert policy.compute_dtype() == jnp.bfloat16


def test_a_jitted_function_is_traced_for_each_side_of_an_island():
    jitted = jax.jit(lambda x: x.astype(policy.compute_dtype()))
    with use_policy(MIXED):
        assert jitted(X).dtype == jnp.bfloat16
        with full_precision():
            assert jitted(X).dtype == jnp.float32


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="full_precision takes a function, but got 3 of type int"):
        full_precision(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
