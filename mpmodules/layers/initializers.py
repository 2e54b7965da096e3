"""Initialisers of half-precision parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.typing import DTypeLike

from mpmodules.functions.functional import HalfSafe, is_half


def half_safe_inits(
    inits: Mapping[str, Callable[..., Any] | None], param_dtype: DTypeLike
) -> dict[str, HalfSafe]:
    """Returns initialisers, by name, that also work in half precision.

    There are none where parameters are not half.

    Args:
      inits: the initialisers of a layer, by argument or field; entries that can't be called are
        left out.
      param_dtype: the dtype of the layer's parameters.
    """
    if not is_half(param_dtype):
        return {}
    return {
        name: init if isinstance(init, HalfSafe) else HalfSafe(init)
        for name, init in inits.items()
        if callable(init)
    }
