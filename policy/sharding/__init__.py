"""Gradients across devices: varying values, reductions, collectives."""
