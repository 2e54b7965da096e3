"""What backward keeps of a computation in float32 over half-precision inputs: the inputs, and the small statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# By name: what is smaller than its operand, or costs a collective to have again.
_KEPT = frozenset(
    (
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"),
        *("psum", "psum_invariant", "pmean", "pmax", "pmin", "reduce_scatter", "psum_scatter"),
        *("all_gather", "all_gather_invariant", "all_to_all", "ppermute"),
    )
)


def keeping_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of which backward keeps the inputs as they came and the results of reductions and collectives.

    Everything else is computed again, elementwise from those. So a function that widens its inputs to float32 leaves no
    float32 copy of them in memory; without differentiation the program is `function`'s own.

    Args:
      function: arrays in, a tree of arrays out; may close over arrays.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _KEPT
