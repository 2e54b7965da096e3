"""The whole suite runs with strict dtype promotion, without rank promotion, and with warnings as errors."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def no_global_policy():
    """Every test starts, and leaves, with no global policy."""
    from policy import set_policy

    set_policy(None)
    yield
    set_policy(None)
