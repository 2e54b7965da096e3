"""The precision of matmuls, a field of a policy: its names."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

HIGHEST = "highest"
_PRECISIONS = ("default", "high", HIGHEST)


def precision_named(value: Any, compute_dtype: np.dtype) -> str | None:
    """Returns the canonical name of a precision, or None for None.

    Args:
      value: None, one of ``default``, ``high`` and ``highest``, a `jax.lax.Precision`, or a
        `jax.lax.DotAlgorithmPreset` or its name.
      compute_dtype: the dtype of the operands.

    Raises:
      ValueError: an unknown name, or an algorithm for operands of other dtypes.
      TypeError: a value of another type.
    """
    if value is None:
        return None
    if not isinstance(value, (str, lax.Precision, lax.DotAlgorithmPreset)):
        raise TypeError(
            f"Policy(precision={value!r}): it should be {', '.join(_PRECISIONS)}, the name of a "
            "jax.lax.DotAlgorithmPreset, or None."
        )
    name = value if isinstance(value, str) else value.name
    if name.lower() in _PRECISIONS:
        return name.lower()
    name = name.upper()
    fitting = [each.name for each in lax.DotAlgorithmPreset if _multiplies(each, compute_dtype)]
    if name not in fitting:
        known = name in lax.DotAlgorithmPreset.__members__
        reason = f"it does not multiply {compute_dtype}" if known else "it is no precision"
        raise ValueError(
            f"Policy(precision={value!r}): {reason}. It should be one of "
            f"{', '.join((*_PRECISIONS, *fitting))}."
        )
    return name


def is_algorithm(name: str | None) -> bool:
    """Returns whether a canonical name is that of an algorithm: it is for operands of a dtype."""
    return name is not None and name not in _PRECISIONS


def _multiplies(algorithm: lax.DotAlgorithmPreset, dtype: np.dtype) -> bool:
    return any(dtype == np.dtype(each) for each in algorithm.supported_lhs_types or ())


def canonical_precision(name: str) -> Any:
    """Returns a precision as the primitives of matmuls and convolutions hold it."""
    if name in _PRECISIONS:
        return (lax.Precision[name.upper()],) * 2
    return lax.DotAlgorithmPreset[name]
