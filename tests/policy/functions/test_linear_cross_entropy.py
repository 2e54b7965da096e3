"""The loss of a linear layer's logits in chunks, beside the loss of these logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import use_policy
from policy.losses import linear_softmax_cross_entropy as chunked
from tests.policy.functions.linear_operands import BIAS, KERNEL, LABELS, OPTIONS, X, of_logits
from tests.programs import named, operations

WEIGHTS = np.random.default_rng(1).uniform(0, 2, LABELS.shape).astype(np.float32)
WEIGHTS[0, :3] = 0
near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-6)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_are_those_of_the_logits(options, reduction, axis):
    def ours(x, kernel, bias):
        kernel = kernel if axis else kernel.T
        given: Any = {"weights": WEIGHTS, "reduction": reduction, "axis": axis, **options}
        return chunked(x, kernel, LABELS, bias, chunk_size=8, **given)

    def theirs(x, kernel, bias):
        loss = of_logits(x, kernel, bias, **options) * WEIGHTS
        return loss if reduction is None else loss.sum() / (WEIGHTS.sum() ** (reduction == "mean"))

    found, truth = (
        jax.value_and_grad(lambda *args, f=f: f(*args).sum(), (0, 1, 2))(X, KERNEL, BIAS)
        for f in (ours, theirs)
    )
    jax.tree.map(near, found, truth)
    near(ours(X, KERNEL, BIAS), theirs(X, KERNEL, BIAS))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, -1])
def test_gradients_in_float32_are_within_2_ulps_of_float64(axis):
    rng, examples, classes = np.random.default_rng(0), 512, 2048
    labels = rng.integers(0, classes, examples)
    x = rng.normal(size=(examples, 64)).astype(np.float32)
    kernel = (rng.normal(size=(64, classes)) / 6).astype(np.float32)
    found = _gradients(x, kernel, labels, axis)
    for ours, exact in zip(found, _exact_gradients(x, kernel, labels), strict=True):
        assert abs(ours - exact).max() < 2 * 2**-23 * abs(exact).max()


@pytest.mark.slow
def test_gradients_of_probable_labels_keep_their_digits():
    kernel = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    kernel *= 4 / np.linalg.norm(kernel, axis=0)
    x, labels = 2 * kernel[:, :8].T, np.arange(8)  # the other probabilities sum to 4e-9 to 3e-5
    found = _gradients(x, kernel, labels, -1)
    for ours, exact in zip(found, _exact_gradients(x, kernel, labels), strict=True):
        scale = abs(exact).max(1, keepdims=True)
        # a float32 logit of 32 is off by up to 2e-6, and its exponential by as much of itself
        assert (abs(ours - exact) / scale).max() < 1e-5


def test_a_bfloat16_input_of_a_float32_layer_gets_a_gradient_that_is_rounded_once():
    x, kernel = X.astype(jnp.bfloat16), KERNEL
    with use_policy("float32"):
        found = jax.grad(lambda x, kernel: chunked(x, kernel, LABELS, chunk_size=8), (0, 1))
        of_x, of_kernel = found(x, kernel)
    exact = jax.grad(lambda x: chunked(x, kernel, LABELS, chunk_size=8))(x.astype(jnp.float32))
    assert (of_x.dtype, of_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(of_x, exact.astype(jnp.bfloat16))


def _gradients(x, kernel, labels, axis):
    def loss(x, kernel):
        return chunked(x, kernel if axis else kernel.T, labels, chunk_size=128, axis=axis)

    return (np.asarray(each, np.float64) for each in jax.grad(loss, (0, 1))(x, kernel))


def _exact_gradients(x, kernel, labels):
    x, kernel, rows = x.astype(np.float64), kernel.astype(np.float64), np.arange(len(labels))
    logits = x @ kernel
    slope = np.exp(logits - logits.max(1, keepdims=True))
    slope /= slope.sum(1, keepdims=True)
    slope[rows, labels] = 0
    slope[rows, labels] = -slope.sum(1)
    slope /= len(labels)
    return slope @ kernel.T, x.T @ slope


def test_forward_mode_is_rejected_with_the_way_out():
    def loss(x):
        return chunked(x, KERNEL, LABELS, BIAS, chunk_size=16)

    for forward in (loss, jax.jit(loss)):
        with pytest.raises(
            NotImplementedError, match=r"in forward mode .*reverse mode.*_integer_l"
        ):
            jax.jvp(forward, (X,), (X,))


# The formula of float32 logits is off by 1.09 x 2^-8 and 0.97 x 2^-11, this by 1.06 and 0.88.
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("reduction", ["mean", None])
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 1.1 * 2**-8), ("mixed_float16", 2**-11)]
)
def test_three_matmuls_run_in_half_and_all_else_in_float32(policy, tolerance, reduction):
    def loss(x, kernel):
        return chunked(x, kernel, LABELS, chunk_size=8, reduction=reduction).mean()

    gradient = jax.grad(loss, (0, 1))
    truth = gradient(X, KERNEL)
    with use_policy(policy):
        ops, found = operations(gradient, X, KERNEL), gradient(X, KERNEL)
    half = policy.removeprefix("mixed_")
    dots = named(ops, "dot_general")
    count = 3 if reduction else 4
    assert [(*op.inputs, *op.outputs) for op in dots] == [(half, half, "float32")] * count
    others = [op for op in ops if op.name in ("exp", "log", "reduce_sum", "reduce_max", "add_any")]
    assert {dtype for op in others for dtype in op.inputs} == {"float32"}
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)


def test_small_weights_and_a_loss_scale_lose_nothing_in_float16():
    def loss(x, kernel, size):
        return chunked(x, kernel, LABELS, weights=size * WEIGHTS, reduction="sum", chunk_size=8)

    with use_policy("mixed_float16"):
        small, one = (jax.grad(loss, (0, 1))(X, KERNEL, size) for size in (1e-12, 1.0))
    jax.tree.map(lambda a, b: near(1e12 * a, b), small, one)


@pytest.mark.slow
def test_ignored_examples_may_hold_anything_and_none_left_costs_nothing():
    x = jnp.asarray(X).at[0, :3].set(jnp.nan)
    labels = jnp.asarray(LABELS).at[0, :3].set(-100)

    def loss(x, kernel, labels):
        return chunked(x, kernel, labels, ignore_index=-100, chunk_size=8)

    found = jax.value_and_grad(loss, (0, 1))(x, KERNEL, labels)
    keep = np.ones(LABELS.shape, np.float32)
    keep[0, :3] = 0
    theirs = lambda x, w: jnp.sum(of_logits(x, w, None) * keep) / keep.sum()  # noqa: E731
    jax.tree.map(near, found, jax.value_and_grad(theirs, (0, 1))(X, KERNEL))
    empty = jax.value_and_grad(loss, (0, 1))(X, KERNEL, jnp.full_like(labels, -100))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(empty))
    assert loss(X[:0], KERNEL, labels[:0]) == 0


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "kernel should be floating, but got int32", {"kernel": KERNEL.astype("i4")}),
        (TypeError, "labels should be integers, but got float32", {"labels": WEIGHTS}),
        (ValueError, r"kernel \(K, d\) for axis=0, but got", {"axis": 0}),
        (
            ValueError,
            r"labels should have the shape .*\(4, 9\), but got \(9,\)",
            {"labels": LABELS[0]},
        ),
        (ValueError, r"bias should be \(50,\), but got \(1,\)", {"bias": np.ones(1, "f4")}),
        (ValueError, "axis should be 0 or -1, but got 2", {"axis": 2}),
        (ValueError, "reduction should be 'mean', 'sum', 'none' or None", {"reduction": "average"}),
        (ValueError, "soft_cap should be positive, but got 0", {"soft_cap": 0}),
        (ValueError, "chunk_size should be at least 1, but got 0", {"chunk_size": 0}),
        (ValueError, r"label_smoothing should be in \[0, 1\)", {"label_smoothing": 1.0}),
        (ValueError, "axis 'model' is not mapped here", {"axis_name": "model"}),
    ],
)
def test_bad_arguments_are_rejected(error, message, changes):
    with pytest.raises(error, match=message):
        chunked(**({"x": X, "kernel": KERNEL, "labels": LABELS} | changes))
