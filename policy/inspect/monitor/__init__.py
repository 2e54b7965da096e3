"""Statistics of a training run, step by step: a log of them, and advice."""
