"""The precision of matmuls: a field of a policy, and what float32 inside of half precision means.

By default a TPU multiplies float32 operands in one pass of bfloat16, and an NVIDIA GPU in TF32. A
module that is asked for float32 in a half-precision model multiplies at the highest precision.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from policy.policy import Policy

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
    """Returns whether a canonical name is that of an algorithm, for operands of some dtypes only."""
    return name is not None and name not in _PRECISIONS


def _multiplies(algorithm: lax.DotAlgorithmPreset, dtype: np.dtype) -> bool:
    return dtype in map(np.dtype, algorithm.supported_lhs_types or ())


def precision_within(policy: Policy, around: Policy | None) -> str | None:
    """Returns the precision of the matmuls of a module, or None for JAX's default.

    It is the policy's own; else the highest where the policy computes in at least float32 and the
    one around it in half precision.

    Args:
      policy: the policy that the module obeys.
      around: the policy in force where it is called, or None.
    """
    if policy.precision is not None:
        return policy.precision
    is_island = policy.compute_dtype.itemsize >= 4 and is_half(around)
    return HIGHEST if is_island else None


def is_half(policy: Policy | None) -> bool:
    """Returns whether a policy computes in half precision."""
    return policy is not None and policy.compute_dtype.itemsize < 4


def multiplying(
    policy: Policy | None, around: Policy | None
) -> contextlib.AbstractContextManager[Any]:
    """Puts the precision of a module's matmuls in force for its call; see `precision_within`.

    A precision that is given to a layer or to an operation wins.
    """
    precision = None if policy is None else precision_within(policy, around)
    if precision is None or precision == jax.config.jax_default_matmul_precision:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


def canonical_precision(name: str) -> Any:
    """Returns a precision as the primitives of matmuls and convolutions hold it."""
    if name in _PRECISIONS:
        return (lax.Precision[name.upper()],) * 2
    return lax.DotAlgorithmPreset[name]


def precision_in_force() -> str | None:
    """Returns the precision of operations that are given none, or None for JAX's default.

    Rules of differentiation may be traced later, outside of the module's call: they are handed
    this.
    """
    return jax.config.jax_default_matmul_precision
