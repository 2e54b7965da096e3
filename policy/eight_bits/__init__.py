"""Matmuls and convolutions whose operands are quantized to 8 bits."""
