"""The cost of autocast's casts: their number, and the bytes of residuals. Traced only."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy.autocasting.transform import autocast
from tests.programs import operations

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def casts_of(fn: Any, params: Any, x: Any, source: str, target: str) -> int:
    ops = operations(autocast(fn, "mixed_bfloat16", params=0), params, x)
    found = [op for op in ops if op.name == "convert_element_type" and op.inputs == (source,)]
    return sum(op.outputs == (target,) for op in found)


def saved(fn: Any, params: Any, x: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of what the backward pass keeps beside inputs."""
    cast = autocast(fn, "mixed_bfloat16", params=0)
    jaxpr = jax.make_jaxpr(lambda p, x: jax.vjp(lambda p: jnp.sum(cast(p, x)), p)[1])(
        params, x
    ).jaxpr
    kept = {id(v): v.aval for v in jaxpr.outvars if not any(v is invar for invar in jaxpr.invars)}
    return [(str(aval.dtype), aval.shape) for aval in kept.values()]


def normalised(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def test_readers_of_a_normalisation_share_one_cast_and_one_saved_copy():
    def fn(w: Any, x: Any) -> Any:
        y = normalised(x)
        return (y @ w["q"]) * (y @ w["k"]) * (y @ w["v"])

    params = dict.fromkeys("qkv", W)
    assert casts_of(fn, params, X, "float32", "bfloat16") == 3 + 1
    assert (
        saved(fn, params, X).count(("bfloat16", X.shape)) <= 1 + 4
    )  # the copy, three products and one of two


def test_a_weight_is_cast_at_each_use():
    def fn(w: Any, x: Any) -> Any:
        return x @ w["a"] @ w["a"] @ w["a"]

    assert casts_of(fn, {"a": W}, X, "float32", "bfloat16") == 3 + 1


def test_a_half_value_is_widened_once_for_all_float32_readers():
    def fn(w: Any, x: Any) -> Any:
        y = x @ w["a"]
        return jnp.sum(jnp.exp(y)) + jnp.sum(jnp.square(y)) + jnp.sum(jnp.log1p(jnp.abs(y)))

    assert casts_of(fn, {"a": W}, X, "bfloat16", "float32") == 2  # y and its absolute value


@pytest.mark.parametrize(
    "activation", [nn.relu, nn.silu, jax.checkpoint(jnp.tanh)], ids=["relu", "silu", "checkpoint"]
)
def test_a_function_of_a_normalisation_saves_nothing_in_float32(activation):
    def fn(w: Any, x: Any) -> Any:
        return activation(normalised(x @ w["a"])) @ w["b"]

    without = saved(lambda w, x: normalised(x @ w["a"]) @ w["b"], {"a": W, "b": W}, X)
    kept = saved(fn, {"a": W, "b": W}, X)
    assert kept.count(("float32", X.shape)) == without.count(("float32", X.shape))


@pytest.mark.parametrize(
    "activation",
    [nn.softplus, nn.elu, nn.selu, nn.log_sigmoid, jax.nn.mish],
    ids=lambda f: f.__name__,
)
def test_an_elementwise_function_in_float32_saves_its_input_alone(activation):
    kept = saved(lambda w, x: activation(x @ w["a"]) @ w["b"], {"a": W, "b": W}, X)
    assert ("float32", X.shape) not in kept
