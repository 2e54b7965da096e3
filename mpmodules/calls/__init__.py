"""Calls of modules under a policy, for both apis."""
