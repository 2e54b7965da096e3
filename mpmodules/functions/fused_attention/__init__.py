"""Attention in one kernel, on GPUs and TPUs."""
