"""Gradients: scaled losses, microbatches, float32 sums of cotangents."""

from policy.grads.microbatching import accumulate_gradients, split_batch

__all__ = ["accumulate_gradients", "split_batch"]


def __dir__() -> list[str]:
    return list(__all__)
