"""Errors of a last linear layer's gradients, beside those of the loss of its float32 logits.

    python -m benchmarks.accuracy.logits

2048 examples of width 512 in chunks of 1024, and 8192 classes, with gaussian logits of standard
deviation 1.4, on the CPU. Truth is the formula in float64. Errors are in ulps, 2^-23 for float32
operands and 2^-8 for bfloat16 ones: "largest" is the largest error over the largest entry; "norm"
is that of all errors over that of the gradient; "entry" is the largest error over the sum of the
absolute terms of its entry, without which no entry near 0 has a scale. The bound of the largest
error in float32 is 2 ulps.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.table import Row, run
from policy import losses, use_policy

EXAMPLES, WIDTH, CLASSES = 2048, 512, 8192


def _truth(x: np.ndarray, kernel: np.ndarray, labels: np.ndarray) -> list[tuple[Any, Any]]:
    """Returns the gradients of x and the kernel, each with the sums of its absolute terms."""
    logits = x.astype(np.float64) @ kernel.astype(np.float64)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    slope = powers / powers.sum(1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= len(labels)
    return [
        (slope @ kernel.T, abs(slope) @ abs(kernel.T)),
        (x.T @ slope, abs(x.T) @ abs(slope)),
    ]


def _errors(found: Array, truth: Any, terms: Any, ulp: float) -> dict[str, float]:
    error = abs(np.asarray(found, np.float64) - truth)
    return {
        "largest": float(error.max() / abs(truth).max() / ulp),
        "norm": float(np.linalg.norm(error) / np.linalg.norm(truth) / ulp),
        "entry": float((error / terms).max() / ulp),
    }


def rows(small: bool = False) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    examples, classes = (256, 1024) if small else (EXAMPLES, CLASSES)
    labels = rng.integers(0, classes, examples)
    x, kernel = rng.normal(size=(examples, WIDTH)), rng.normal(size=(WIDTH, classes)) / 16

    def ours(x: Array, kernel: Array) -> Array:
        return losses.linear_softmax_cross_entropy(x, kernel, labels, chunk_size=1024)

    for dtype, policy, ulp in (
        (jnp.dtype("float32"), "float32", 2.0**-23),
        (jnp.dtype("bfloat16"), "mixed_bfloat16", 2.0**-8),
    ):

        def formula(x: Array, kernel: Array, dtype: Any = dtype) -> Array:
            numbers = (((1,), (0,)), ((), ()))
            operands = x.astype(dtype), kernel.astype(dtype)
            logits = lax.dot_general(*operands, numbers, preferred_element_type=jnp.float32)
            return losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        given = [np.asarray(a, dtype).astype(np.float32) for a in (x, kernel)]
        truths = _truth(given[0], given[1], labels)
        with use_policy(policy):
            found = [jax.jit(jax.grad(f, (0, 1)))(*given) for f in (ours, formula)]
        for at, name in enumerate(("x", "kernel")):
            both = [_errors(gradients[at], *truths[at], ulp) for gradients in found]
            for quantity in both[0]:
                row = Row(quantity, f"{dtype}, {name}", both[0][quantity], both[1][quantity], 1.05)
                if quantity == "largest" and dtype == jnp.float32:
                    row = dataclasses.replace(row, bound=round(2 / row.reference, 3))
                yield row


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "formula"))
