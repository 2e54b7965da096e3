"""What a training run's numbers do, step by step: statistics, a log of them, and advice."""
