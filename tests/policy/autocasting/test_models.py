"""Every model, forward, jitted, differentiated and mapped: matmuls in half, sums in float32,
results near float32's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import BF16, MODELS, POLICIES, Model, error, half_of
from tests.programs import Operation, operations

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SENSITIVE = (
    "exp",
    "log",
    "log1p",
    "rsqrt",
    "square",
    "reduce_sum",
    "cumsum",
    "scatter-add",
    "reduce_window_sum",
)
EACH = pytest.mark.parametrize("name", MODELS)


def loss_of(model: Model, fn: Any) -> Any:
    return lambda params: jnp.mean(jnp.square(fn(params, model.x).astype(jnp.float32)))


def floating(op: Operation) -> list[str]:
    return [
        dtype
        for dtype in op.inputs
        if dtype in ("bfloat16", "float16", "float32", "float64", "complex64")
    ]


def matmuls(ops: list[Operation], name: str) -> list[Operation]:
    """The matmuls of real numbers, outside of linear solves, which are float32's."""
    found = [op for op in ops if op.name in MATMULS and "complex64" not in op.inputs]
    return [op for op in found if not {"custom_linear_solve", "triangular_solve"} & set(op.within)]


@EACH
@POLICIES
def test_matmuls_run_in_half_and_sums_in_float32_forward_and_backward(name, policy):
    model = MODELS[name]
    half = half_of(policy)
    loss = loss_of(model, model.fn)
    programs = [operations(jax.grad(autocast(loss, policy, params=0)), model.params)]
    if half == "bfloat16":
        programs.append(operations(autocast(jax.grad(loss), policy, params=0), model.params))
        programs.append(operations(autocast(model.fn, policy), model.params, model.x))
    for ops in programs:
        found = matmuls(ops, name)
        assert len(found) >= model.matmuls
        assert {dtype for op in found for dtype in floating(op)} == {half}
        sensitive = [op for op in ops if op.name in SENSITIVE and op.terms != 1]
        assert {dtype for op in sensitive for dtype in floating(op)} <= {"float32", "complex64"}


@EACH
def test_results_and_gradients_are_float32s_to_a_few_bits(name):
    model = MODELS[name]
    cast = autocast(model.fn, BF16)

    @jax.jit  # one compilation
    def run(params):
        loss = loss_of(model, model.fn)
        outside = autocast(jax.grad(loss), BF16, params=0)(params)
        return (
            cast(params, model.x),
            model.fn(params, model.x),
            jax.grad(loss)(params),
            (
                jax.grad(loss_of(model, cast))(params),
                outside,
            ),
        )

    found, expected, truth, both = run(model.params)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert error(found, expected) < 3e-2
    for gradients in both:
        whole = [
            np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)])
            for tree in (gradients, truth)
        ]
        assert error(*whole) < 6e-2
        jax.tree.map(
            lambda g, p: (g.dtype, g.shape) == (p.dtype, p.shape) or pytest.fail(),
            gradients,
            model.params,
        )


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.batched])
def test_it_maps_over_a_batch_in_either_order(name):
    model = MODELS[name]
    batch = jnp.stack([model.x, model.x[::-1]])
    cast = autocast(model.fn, BF16)

    @jax.jit
    def run(params, batch):
        inside = autocast(jax.vmap(model.fn, (None, 0)), BF16)(params, batch)
        return (
            jnp.stack([cast(params, x) for x in batch]),
            jax.vmap(cast, (None, 0))(params, batch),
            inside,
        )

    expected, *others = run(model.params, batch)
    for found in others:
        assert error(found, expected) < 2e-2
