"""Measures functions against the same functions in float32, or against other functions."""
