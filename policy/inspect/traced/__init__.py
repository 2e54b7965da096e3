"""A user's call, traced: its arguments, gradients and kept dtypes."""
