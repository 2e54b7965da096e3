"""Compiled programs: memory, cycles, traffic and exchanges."""
