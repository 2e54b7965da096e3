"""Arrays, and the errors of what functions return of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, scale: float = 1.0) -> Any:
    """Returns normal numbers, the same for the same shape."""
    return jnp.asarray(scale * np.random.default_rng(shape).normal(size=shape), jnp.float32)


def exactly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that rounds where it says so."""
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})


def relative(value: Any, truth: Any) -> float:
    """Returns the norm of a difference / norm of the truth, of all leaves together."""
    flat = [np.concatenate([np.ravel(a) for a in jax.tree.leaves(t)]) for t in (value, truth)]
    value, truth = (a.astype(np.float64) for a in flat)
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))
