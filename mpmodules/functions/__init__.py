"""The maths of layers, as functions of arrays."""
