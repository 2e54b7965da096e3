"""Flax's modules as tracers read them: names, pure calls and copies."""
