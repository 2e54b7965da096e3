"""Gradients: scaled losses, microbatches, float32 sums of cotangents."""

from policy.grads.loss_scale import ScaledGradients as ScaledGradients

__all__ = ["ScaledGradients"]


def __dir__() -> list[str]:
    return list(__all__)
