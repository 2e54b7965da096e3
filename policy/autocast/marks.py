"""Marks on JAX's name stack: dtypes of a ported model's own code, and layers with policies."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy._jaxpr.dtypes import F32, is_floating_dtype
from policy._jaxpr.paths import Path
from policy._jaxpr.scope_names import REGION
from policy.autocast.values import cast

LAYER = f"{REGION}layer"  # a layer that obeys a policy itself
HANDED_ON = f"{REGION}handed_on"  # the cast of its result, for the code around it
_COMPUTE = f"{REGION}computes_in_"


def is_mark(name: str) -> bool:
    """Returns whether a name on the stack is one of these marks, not that of a module."""
    return name.startswith(REGION)


def layer() -> contextlib.AbstractContextManager[Any]:
    """Marks the program of a layer: autocast leaves its dtypes as they are traced."""
    return jax.named_scope(LAYER)


def computes_in(dtype: DTypeLike) -> contextlib.AbstractContextManager[Any]:
    """Marks the code of a module: autocast runs it in `dtype`, except inside other marks."""
    return jax.named_scope(f"{_COMPUTE}{np.dtype(dtype).name}")


def marked_dtype(path: Path) -> np.dtype | None:
    """Returns the dtype that the innermost mark of a path names, or None."""
    for name in reversed(path):
        if name.startswith(_COMPUTE):
            return np.dtype(jnp.dtype(name.removeprefix(_COMPUTE)))
    return None


def handed_on(array: Any) -> Any:
    """Returns a layer's half-precision result as float32, for code traced in float32.

    Autocast removes the cast.
    """
    if (
        not is_floating_dtype(getattr(array, "dtype", np.bool_))
        or array.dtype.itemsize >= F32.itemsize
    ):
        return array
    with jax.named_scope(HANDED_ON):
        return cast(array, F32)
