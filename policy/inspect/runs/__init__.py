"""The log of a training run, and advice."""
