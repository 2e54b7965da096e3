"""The loss of a last linear layer in bfloat16, beside float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import use_policy
from policy.losses import linear_softmax_cross_entropy as chunked
from tests.policy.functions.linear_operands import of_logits

TOKENS, WIDTH, CLASSES = 150, 64, 1000


def operands(scale=1.0, shift=0.0, since=0, confidence=0.0):
    """Returns x, a kernel and labels: numbers of bfloat16, in float32.

    Args:
      scale: of the logits.
      shift: added to the logits of classes from `since` on.
      confidence: of the label's logit, over its standard deviation.
    """
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(TOKENS, WIDTH)), scale / 8 * rng.normal(size=(WIDTH, CLASSES))
    labels = rng.integers(0, CLASSES, TOKENS)
    x += confidence * (kernel[:, labels] / np.linalg.norm(kernel[:, labels], axis=0)).T
    if shift:
        x[:, 0], kernel[0, since:] = 1, shift
    x, kernel = (np.asarray(a, jnp.bfloat16).astype(np.float32) for a in (x, kernel))
    return x, kernel, labels


def half(loss: Any) -> Any:
    """Returns `loss` with operands in bfloat16."""

    @functools.wraps(loss)
    def run(*args: Any) -> Any:
        with use_policy("mixed_bfloat16"):
            return loss(*args)

    return run


def of_float64(x, kernel, labels, soft_cap=0.0, z_loss=0.0):
    """Returns the mean loss, and its gradients by x, the kernel and the logits."""
    x, kernel = x.astype(np.float64), kernel.astype(np.float64)
    logits, derivative = x @ kernel, 1.0
    if soft_cap:
        tanh = np.tanh(logits / soft_cap)
        logits, derivative = soft_cap * tanh, 1 - tanh**2
    largest, rows = logits.max(1, keepdims=True), np.arange(len(labels))
    normalizer = largest + np.log(np.exp(logits - largest).sum(1, keepdims=True))
    loss = normalizer[:, 0] - logits[rows, labels] + z_loss * normalizer[:, 0] ** 2
    slope = np.exp(logits - normalizer) * (1 + 2 * z_loss * normalizer)
    others = np.where(rows[:, None] * 0 + np.arange(CLASSES) == labels[:, None], 0, slope).sum(1)
    slope[rows, labels] = 2 * z_loss * normalizer[:, 0] - others
    slope *= derivative / len(labels)
    return loss.mean(), slope @ kernel.T, x.T @ slope, slope


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"scale": 3.0}, {}),
        ({"scale": 20.0}, {}),
        ({"confidence": 12.0}, {}),
        ({"confidence": 30.0}, {}),  # the label's probability is 1 - 1e-5
        ({"shift": 80.0}, {}),
        ({"shift": -80.0}, {}),
        ({"shift": 80.0, "since": 300}, {}),
        ({"shift": -80.0, "since": 300}, {}),
        ({"scale": 3.0}, {"soft_cap": 5.0, "z_loss": 1e-2}),
        ({"scale": 2.0}, {"z_loss": 1e-2, "axis": 0}),
    ],
)
def test_gradients_are_as_accurate_as_with_exact_derivatives_rounded_once(given, options):
    x, kernel, labels = operands(**given)
    axis = options.get("axis", 1)

    @half
    def loss(x, kernel):
        return chunked(x, kernel if axis else kernel.T, labels, chunk_size=50, **options)

    others = {name: value for name, value in options.items() if name != "axis"}
    value, *truths, slope = of_float64(x, kernel, labels, **others)
    found, gradients = jax.value_and_grad(loss, (0, 1))(x, kernel)
    np.testing.assert_allclose(found, value, rtol=2e-6)
    rounded = np.asarray(slope, jnp.bfloat16).astype(np.float64)
    once = rounded @ kernel.T, x.T @ rounded
    errors, expected = (
        [np.asarray(a, np.float64) - b for a, b in zip(pair, truths, strict=True)]
        for pair in (gradients, once)
    )
    for error, one in zip(errors, expected, strict=True):
        assert np.linalg.norm(error) < 1.04 * np.linalg.norm(one)
    columns = [np.linalg.norm(each[1], axis=0) for each in (errors, expected)]
    columns = [column[columns[1] > 2**-50 * np.max(columns[1])] for column in columns]
    assert np.median(columns[0]) < 1.06 * np.median(columns[1])


def test_examples_far_apart_and_ignored_ones_have_their_own_reference():
    x, kernel, labels = operands()
    x[:20] *= 64
    x[20:30] = np.nan
    labels[20:30] = -100
    keep = np.r_[0:20, 30:TOKENS]
    loss = half(lambda x, w, labels: chunked(x, w, labels, ignore_index=-100, chunk_size=50))
    value, of_x, of_kernel, _ = of_float64(x[keep], kernel, labels[keep])
    found, gradients = jax.value_and_grad(loss, (0, 1))(x, kernel, labels)
    np.testing.assert_allclose(found, value, rtol=2e-6)
    assert not np.any(gradients[0][20:30])
    for gradient, truth in zip((gradients[0][keep], gradients[1]), (of_x, of_kernel), strict=True):
        assert np.linalg.norm(gradient - truth) < 0.6 * 2**-8 * np.linalg.norm(truth)


def test_nan_infinity_and_labels_out_of_range_are_not_hidden():
    x, kernel, labels = operands()
    loss = half(lambda x, labels: chunked(x, kernel, labels, chunk_size=50))
    for value in (np.nan, np.inf):
        one = x.copy()
        one[0, 0] = value
        found, gradient = jax.value_and_grad(loss)(one, labels)
        assert not np.isfinite(found) and np.isnan(gradient[0]).all()
        assert np.isfinite(gradient[1:]).all()
    labels[3] = CLASSES
    found, gradient = jax.value_and_grad(loss)(x, labels)
    assert np.isnan(found) and np.isnan(gradient[3]).all() and np.isfinite(gradient[4:]).all()


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_logits():
    x, kernel, labels = operands()

    def penalty(loss: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)

    found = penalty(half(lambda x: chunked(x, kernel, labels, chunk_size=50)))
    truth = penalty(lambda x: of_logits(x, kernel, None, labels).mean())
    assert np.linalg.norm(found - truth) < 2**-6 * np.linalg.norm(truth)
