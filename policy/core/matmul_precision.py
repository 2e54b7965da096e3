"""The precision of the matmuls of a module, and what float32 inside of half precision means.

By default a TPU multiplies float32 operands in one pass of bfloat16, and an NVIDIA GPU in TF32. A
module that is asked for float32 in a half-precision model multiplies at the highest precision.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from policy.core.policy import Policy
from policy.core.precision import HIGHEST


def precision_within(policy: Policy | None, around: Policy | None) -> str | None:
    """Returns the precision of the matmuls of a module, or None for JAX's default.

    It is the policy's own; else the highest where the policy computes in at least float32 and the
    one around it in half precision.

    Args:
      policy: the policy that the module obeys, or None.
      around: the policy in force where it is called, or None.
    """
    if policy is None or policy.precision is not None:
        return None if policy is None else policy.precision
    is_island = policy.compute_dtype.itemsize >= 4 and computes_in_half(around)
    return HIGHEST if is_island else None


def computes_in_half(policy: Policy | None) -> bool:
    """Returns whether a policy computes in half precision."""
    return policy is not None and policy.compute_dtype.itemsize < 4


def multiplying(
    policy: Policy | None, around: Policy | None
) -> contextlib.AbstractContextManager[Any]:
    """Puts the precision of a module's matmuls in force for its call; see `precision_within`.

    A precision that is given to a layer or to an operation wins.
    """
    config: Any = jax.config
    precision = precision_within(policy, around)
    if precision is None or precision == config.jax_default_matmul_precision:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)
