"""Readers of jaxprs: every equation with its place, and the values as a graph."""
