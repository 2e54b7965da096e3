"""Policies in modules that are no layers: dtype attributes and outputs."""

from __future__ import annotations

import inspect
from typing import Any

from mpmodules.calls.boundary import cast_outputs
from mpmodules.calls.port_options import may_be_set, spelled_as
from policy.core.policy import Policy


def set_dtype_fields(module: Any, policy: Policy) -> None:
    """Sets the dtype attributes of a module that is no layer to the policy's dtypes."""
    for name, dtype in (("dtype", policy.compute_dtype), ("param_dtype", policy.param_dtype)):
        value = inspect.getattr_static(module, name, NotImplemented)
        if may_be_set(value):
            setattr(module, name, spelled_as(value, dtype))


def in_compute_dtype(policy: Policy, outputs: Any, *, has_carry: bool) -> Any:
    """Casts the outputs of a submodule to compute_dtype, but not a recurrent cell's carry.

    Args:
      policy: the policy in force where it is called.
      outputs: the outputs of its call.
      has_carry: whether the first of a pair of outputs is a recurrent cell's carry.
    """
    return cast_outputs(
        policy.replace(output_dtype=policy.compute_dtype), outputs, has_carry=has_carry
    )
