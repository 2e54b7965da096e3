"""Matmuls in 8 bits beside bfloat16: their errors, where training ends, published models."""
