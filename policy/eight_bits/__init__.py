"""Matmuls and convolutions whose operands are quantised to 8 bits."""
