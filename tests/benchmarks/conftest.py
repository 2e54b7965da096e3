"""A fixture of several benchmarks."""

import jax
import pytest


@pytest.fixture
def as_the_benchmark_runs():
    """Flax's own layers with a half dtype mix dtypes, and so do peers."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
