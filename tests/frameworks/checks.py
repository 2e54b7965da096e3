"""Checks of models of any library: dtypes of matmuls, and values beside float32."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from policy.programs.primitives import MATMULS
from tests.programs import named, operations


def dtypes_of_matmuls(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Returns the dtypes of all operands of a function's matmuls and convolutions."""
    return {dtype for each in named(operations(fn, *args), *MATMULS) for dtype in each.inputs}


def assert_near(found: Any, wanted: Any, error: float) -> None:
    """Compares the norm of the difference of two trees, and the dtypes of their leaves."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    one, other = map(jax.tree.leaves, (found, wanted))
    assert [leaf.dtype for leaf in one] == [leaf.dtype for leaf in other]
    flat, flat_wanted = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in side])
        for side in (one, other)
    )
    assert np.linalg.norm(flat - flat_wanted) <= error * np.linalg.norm(flat_wanted)
