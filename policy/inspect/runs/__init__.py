"""The log of a training run: its page, and advice."""
