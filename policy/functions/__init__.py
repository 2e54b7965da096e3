"""Reductions, losses and sums in reduction_dtype."""
