"""Functions run in reduction_dtype, whose results are rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.core.casting import is_floating
from policy.core.reduction_dtype import reduction_dtype_of as reduction_dtype_of
from policy.core.reduction_dtype import widest
from policy.functions.checkpointing import keeping_inputs

Axis = int | Sequence[int] | None


def in_reduction_dtype(
    function: Callable[..., Any], *arrays: Any, dtype: DTypeLike | None = None
) -> Any:
    """Calls ``function(*arrays)`` in reduction_dtype and rounds floating results once to `dtype`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> x = jnp.full(4096, 0.1, jnp.bfloat16)
    >>> y = reductions.in_reduction_dtype(lambda x: x.sum() - 400, x)
    >>> y.dtype, f"{float(y):.1f}"
    (dtype(bfloat16), '10.0')

    Args:
      function: arrays in, a tree of arrays out; pure.
      *arrays: floating arrays of any shapes; integers are widened too, None is passed on.
      dtype: of the results; None is the floating dtype that the arrays promote to, float32 for
        integers.
    """
    given = [x for x in arrays if x is not None]
    wide = reduction_dtype_of(*given)
    floating = [
        jnp.result_type(x) for x in given if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    ]
    out = jnp.dtype(dtype) if dtype is not None else widest(floating) if floating else wide

    def run(*arrays: Any) -> Any:
        results = function(*(None if x is None else _as(x, wide) for x in arrays))
        return jax.tree.map(
            lambda y: _as(y, out) if jnp.issubdtype(y.dtype, jnp.inexact) else y, results
        )

    if all(dtype == wide for dtype in floating):
        return run(*arrays)  # nothing was widened: nothing to keep small
    return keeping_inputs(run)(*arrays)


def _as(x: Any, dtype: DTypeLike) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        return x
    return x if x.dtype == dtype and is_floating(x) else x.astype(dtype)
