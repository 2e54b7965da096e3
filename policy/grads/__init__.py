"""Gradients: scaled losses, microbatches, float32 sums of cotangents."""
