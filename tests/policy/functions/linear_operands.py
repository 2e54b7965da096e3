"""Operands of a last linear layer, and the loss of its logits."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from policy import losses, reductions

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 9, 16)).astype(np.float32)
KERNEL = RNG.normal(size=(16, 50)).astype(np.float32)
BIAS = RNG.normal(size=50).astype(np.float32)
LABELS = RNG.integers(0, 50, (4, 9)).astype(np.int32)
LABELS[1, 0] = -1  # the last class
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"soft_cap": 3.0, "label_smoothing": 0.2, "z_loss": 1e-2},
]


def of_logits(
    x: Any, kernel: Any, bias: Any, labels: Any = LABELS, soft_cap: float = 0, **options: Any
) -> Any:
    """Returns the losses of the logits, all in memory."""
    logits = reductions.einsum("...d,dk->...k", x, kernel)
    logits = logits if bias is None else logits + bias.reshape((1,) * (logits.ndim - 1) + (-1,))
    logits = soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
    return losses.softmax_cross_entropy_with_integer_labels(logits, labels, **options)
