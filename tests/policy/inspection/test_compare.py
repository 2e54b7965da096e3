"""compare: what it says of a function is what running it twice says, in every kind of program that JAX has."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import policy
from mpmodules import linen as nn
from policy.inspection import statistics
from policy.inspection.compare import compare
from tests.programs import apply

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> Any:
    return jnp.asarray(scale * RNG.normal(size=shape), F32)


def half_model(w: Any, x: Any) -> Any:
    """Two layers, in half by hand."""
    with jax.named_scope("first"):
        x = jnp.tanh(x.astype(BF16) @ w.astype(BF16))
    with jax.named_scope("second"):
        return jnp.sin(x @ w.astype(BF16)).astype(F32)


def relative(value: Any, truth: Any) -> float:
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def paths(rows: Any) -> list[str]:
    return [row.path for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# The numbers
# ---------------------------------------------------------------------------------------------------------------------


def test_the_statistics_of_two_arrays_are_what_numpy_says() -> None:
    reference = np.array([1.0, 2.0, 1e-9, 1e-5, 1e6, -3.0, 0.0, np.inf], np.float32)
    with np.errstate(over="ignore"):
        value = (reference * np.float32(1.001)).astype(np.float16)
    found = dict(zip(statistics.NAMES, np.asarray(statistics.measured(value, jnp.asarray(reference))), strict=True))
    assert found["underflow"] == 1 / 8 and found["subnormal"] == 1 / 8 and found["overflow"] == 1 / 8
    assert found["undefined"] == 1 / 8 and found["reference_largest"] == 1e6
    assert math.isinf(found["error"]) and found["distance"] == 1 and math.isinf(found["largest"])


def test_error_and_cosine_are_those_of_the_vectors_and_fills_of_masks_are_left_out() -> None:
    truth = RNG.normal(size=(64,))
    value = truth + 0.1 * RNG.normal(size=(64,))
    masked = [np.append(array, np.finfo(np.float32).min).astype(np.float32) for array in (value, truth)]
    found = np.asarray(statistics.measured(*map(jnp.asarray, masked)), np.float64)
    cosine = value @ truth / np.linalg.norm(value) / np.linalg.norm(truth)
    np.testing.assert_allclose(found[:2], [relative(value, truth), 1 - cosine], rtol=1e-5)


def test_each_row_says_what_running_the_function_twice_says() -> None:
    w, x = normal(8, 8), normal(4, 8)
    comparison = compare(half_model, w, x)
    exact = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    half = exact(lambda w, x: jnp.tanh(x.astype(BF16) @ w.astype(BF16)))(w, x)
    first = np.tanh(np.asarray(x, np.float64) @ np.asarray(w, np.float64))
    second = np.sin(first @ np.asarray(w, np.float64))
    assert paths(comparison.activations) == ["first", "second"] and comparison.route == "as written"
    np.testing.assert_allclose(comparison["first"].error, relative(half, first), rtol=1e-3)
    np.testing.assert_allclose(comparison["second"].error, relative(exact(half_model)(w, x), second), rtol=1e-3)
    assert comparison["second"].entering == comparison["first"].error and comparison["first"].entering == 0
    assert comparison.error == comparison.outputs[0].error == comparison["second"].error
    assert comparison["first"].dtype == "bfloat16" and comparison["first"].limit == float(jnp.finfo(BF16).max)
    assert 0 < comparison["first"].largest <= 1 and comparison["first"].headroom < 1e-30
    assert comparison.first_jump is None


def test_gradients_are_those_of_running_the_derivative_twice() -> None:
    w, x = normal(8, 8), normal(4, 8)
    loss = lambda params, x: jnp.square(half_model(params["w"], x)).sum()  # noqa: E731
    comparison = compare(loss, {"w": w}, x, gradients=True)
    half = jax.jit(jax.grad(loss), compiler_options={"xla_allow_excess_precision": False})({"w": w}, x)["w"]
    wide = lambda w: jnp.square(jnp.sin(jnp.tanh(x @ w) @ w)).sum()  # noqa: E731
    assert paths(comparison.parameters) == ["w"] and paths(comparison.gradients) == ["second", "first"]
    np.testing.assert_allclose(comparison.parameters[0].error, relative(half, jax.jit(jax.grad(wide))(w)), rtol=1e-2)
    assert comparison.gradients[0].error > 0


def test_a_loss_scale_lifts_gradients_out_of_the_underflow() -> None:
    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("dense"):
            y = x.astype(F16) @ w.astype(F16)
        return 1e-10 * jnp.sum(y.astype(F32))

    lost, kept = (
        compare(loss, normal(4, 4), normal(4, 4), gradients=True, loss_scale=scale) for scale in (1.0, 2.0**24)
    )
    assert lost["dense"].error < 1e-3 and lost.parameters[0].underflow == 1.0 and lost.parameters[0].error == 1.0
    assert kept.parameters[0].underflow == 0 and kept.parameters[0].error < 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# Where the error is made
# ---------------------------------------------------------------------------------------------------------------------


def deep(layers: int, x: Any, ws: Any, dtype: Any, planted: int | None = None) -> Any:
    """Pre-norm attention and feed-forward blocks; one multiplies by what float16 can't hold."""
    x = x.astype(dtype)
    with jax.named_scope("Net"):
        for i in range(layers):
            with jax.named_scope(f"layer_{i}"):
                with jax.named_scope("attention"):
                    y = x / jnp.sqrt(jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True)).astype(dtype)
                    weights = jax.nn.softmax((y @ y.T).astype(F32) * F32(0.1)).astype(dtype)
                    x = x + weights @ y
                with jax.named_scope("dense"):
                    y = x @ ws[i % 2].astype(dtype)
                    y = y * jnp.asarray(3e4, dtype) * jnp.asarray(1e3, dtype) if i == planted else y
                x = x + y * jnp.asarray(0.1, dtype)
        return x.astype(F32)


@pytest.fixture(scope="module")
def weights() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    return jnp.asarray(generator.normal(size=(4, 8)), F32), jnp.asarray(generator.normal(size=(2, 8, 8)), F32)


def test_an_overflow_at_depth_12_of_24_layers_is_named_and_its_successors_are_not(weights: Any) -> None:
    comparison = compare(lambda x, ws: deep(24, x, ws, F16, planted=12), *weights)
    assert comparison.first_jump == "Net/layer_12/dense" and comparison.jump_step is None
    row = comparison["Net/layer_12/dense"]
    assert row.is_jump and row.overflow > 0 and math.isinf(row.error) and row.entering < 0.01
    assert not comparison["Net/layer_11/dense"].is_jump and not comparison["Net/layer_13/dense"].is_jump
    assert "The error jumps first at Net/layer_12/dense: mul, test_compare.py:" in str(comparison)


def test_a_clean_model_jumps_nowhere_in_either_half_dtype(weights: Any) -> None:
    for dtype in (F16, BF16):
        comparison = compare(lambda x, ws, dtype=dtype: deep(2, x, ws, dtype), *weights)
        assert comparison.first_jump is None and "The error jumps nowhere." in str(comparison)
        assert all(0 < row.error < 0.05 for row in comparison.activations)


def test_an_overflow_in_one_step_of_a_scan_is_named_with_its_step() -> None:
    def layers(x: Any, scales: Any) -> Any:
        def layer(x: Any, scale: Any) -> Any:
            with jax.named_scope("block"):
                x = x * scale.astype(F16)
            return x, None

        with jax.named_scope("layers"):
            return lax.scan(layer, x.astype(F16), scales)[0].astype(F32).sum()

    scales = jnp.asarray([1.0, 1.5, 1.5, 6e4, 1.0], F32)
    comparison = compare(layers, normal(4, scale=9.0), scales)
    steps = comparison["layers/block"].steps
    assert comparison.first_jump == "layers/block" and comparison.jump_step == 3
    assert max(steps[:3]) < 0.01 and steps[3] == steps[4] == math.inf
    assert "at layers/block, step 3 of its scan" in str(comparison)
    scales = scales.at[3].set(jnp.nan)
    assert compare(layers, normal(4), scales).notes[0].startswith("NaN in the inputs: args[1].")


def test_underflow_and_cancellation_are_jumps_of_the_layers_that_make_them() -> None:
    def small(x: Any) -> Any:
        with jax.named_scope("fine"):
            x = x.astype(F16) * F16(0.5)
        with jax.named_scope("small"):
            x = x * F16(1e-4) * F16(1e-4)
        with jax.named_scope("after"):
            return x * F16(1e4)

    def cancels(x: Any) -> Any:
        with jax.named_scope("fine"):
            x = x.astype(BF16) + BF16(1000)
        with jax.named_scope("centred"):
            return x - BF16(1000)

    lost = compare(small, normal(32))
    assert lost.first_jump == "small" and lost["small"].underflow == 1.0 and lost["after"].is_jump is False
    assert compare(cancels, normal(32)).first_jump == "centred"
