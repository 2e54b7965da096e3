"""Ports Flax code: deletes the dtypes that it passes along, for ``python -m policy port``."""
