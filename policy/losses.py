"""Losses computed and returned in reduction_dtype, from logits of any floating dtype.

The logits are widened inside the loss. The residuals are the logits in their own dtype; the softmax
is recomputed from them in the backward pass. Results are in reduction_dtype: float32 under every
policy except float64's.
"""

from policy.functions.linear_cross_entropy import linear_softmax_cross_entropy
from policy.functions.losses import (
    cosine_distance,
    cosine_similarity,
    ctc_loss,
    kl_divergence,
    kl_divergence_with_log_targets,
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
    squared_error,
)

__all__ = [
    "cosine_distance",
    "cosine_similarity",
    "ctc_loss",
    "kl_divergence",
    "kl_divergence_with_log_targets",
    "linear_softmax_cross_entropy",
    "sigmoid_binary_cross_entropy",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "squared_error",
]


def __dir__() -> list[str]:
    return list(__all__)
