"""A language model of hand-written layers runs in half, in both wings, with the gradients of a
careful author.
"""

# What Flax returns is typed as Flax's own class.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx
from policy import use_policy
from tests.mpmodules.own_parameters_net import (
    LENGTH,
    WORDS,
    LinenModel,
    NnxModel,
    by_hand,
)
from tests.programs import named, operations

IDS = jax.random.randint(jax.random.key(1), (4, LENGTH), 0, WORDS)


def loss_of(logits: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits.astype(jnp.float32))[..., 3].mean()


def linen_loss(params: Any, dtype_policy: str | None = "mixed_bfloat16") -> jax.Array:
    with use_policy(dtype_policy):
        return loss_of(LinenModel().apply({"params": params}, IDS))  # type: ignore[arg-type]


def nnx_loss(params: Any, dtype_policy: str | None = "mixed_bfloat16") -> jax.Array:
    graph, state, rest = flax_nnx.split(
        NnxModel(nnx.Rngs(0), dtype_policy=dtype_policy), flax_nnx.Param, ...
    )
    flax_nnx.replace_by_pure_dict(state, params)
    return loss_of(flax_nnx.merge(graph, state, rest)(IDS))


WINGS: dict[str, Callable[..., jax.Array]] = {"linen": linen_loss, "nnx": nnx_loss}


@pytest.fixture(scope="module")
def params() -> Any:
    return LinenModel().init(jax.random.key(0), IDS)["params"]


@functools.cache
def _gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.grad(function))


def _distance(a: Any, b: Any) -> float:
    parts = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(np.sqrt(sum(np.sum(np.square(np.float64(x) - np.float64(y))) for x, y in parts)))


@pytest.mark.parametrize("wing", WINGS)
def test_no_matmul_runs_in_float32_and_the_residual_stream_is_half(wing: str, params: Any) -> None:
    ops = operations(jax.grad(WINGS[wing]), params)
    dots = named(ops, "dot_general")
    assert len(dots) > 20
    assert {(*op.inputs, *op.outputs) for op in dots} == {("bfloat16",) * 3}
    sums = [op for op in named(ops, "add") if not op.is_backward and op.outputs == ("float32",)]
    assert not [op for op in sums if "bfloat16" in op.inputs]


@pytest.mark.parametrize("wing", WINGS)
def test_gradients_are_as_near_to_float32_as_those_threaded_by_hand(wing: str, params: Any) -> None:
    truth = _gradient(lambda p: loss_of(by_hand(p, IDS, jnp.float32)))(params)
    by_author = _gradient(lambda p: loss_of(by_hand(p, IDS, jnp.bfloat16)))(params)
    ours = _gradient(WINGS[wing])(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {jnp.dtype("float32")}
    assert _distance(ours, truth) <= 1.1 * _distance(by_author, truth)


@pytest.mark.parametrize("wing", WINGS)
def test_backward_keeps_no_more_than_by_hand(wing: str, params: Any) -> None:
    def kept(function: Callable[..., jax.Array]) -> int:
        _, pullback = jax.eval_shape(lambda p: jax.vjp(function, p), params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    # Softmax's probabilities and the tables of sines are float32.
    assert kept(WINGS[wing]) <= 1.02 * kept(lambda p: loss_of(by_hand(p, IDS, jnp.bfloat16)))


@pytest.mark.parametrize("wing", WINGS)
def test_without_a_policy_the_numbers_are_those_of_plain_functions(wing: str, params: Any) -> None:
    ours = WINGS[wing](params, None)
    assert ours == loss_of(by_hand(params, IDS, jnp.float32))


def test_both_wings_have_the_same_tree(params: Any) -> None:
    state = flax_nnx.state(NnxModel(nnx.Rngs(0)), flax_nnx.Param)
    assert jax.tree.structure(flax_nnx.to_pure_dict(state)) == jax.tree.structure(params)


def test_accessors_tell_the_dtypes_in_force() -> None:
    accessors = (
        policy.param_dtype,
        policy.compute_dtype,
        policy.output_dtype,
        policy.reduction_dtype,
    )
    assert [accessor() for accessor in accessors] == [None] * 4
    with use_policy("p=f32,c=bf16,o=f16"):
        assert [accessor() for accessor in accessors] == [
            "float32",
            "bfloat16",
            "float16",
            "float32",
        ]
