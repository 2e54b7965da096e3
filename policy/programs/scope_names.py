"""Names that this library puts on JAX's name stack, to tell its own casts and marks."""

from __future__ import annotations

import re

from policy.programs.protocols import Equation

BOUNDARY = "policy_boundary"
"""The scope of the casts where a call crosses from one policy to another."""

ISLAND = "policy_full_precision"
"""The scope that `policy.full_precision` keeps in float32."""

AUTOCAST = "policy_autocast"
"""The scope of the casts that autocast puts in."""

REGION = "policy_region_"
"""The prefix of the marks of `policy.programs.tracing.marks`."""

EXCHANGE = f"{REGION}exchange"
"""The scope of a sum over devices in a dtype that the caller asked for."""


def innermost_scope(equation: Equation) -> str:
    """Returns the innermost name on the stack of an equation, transforms aside."""
    return re.split("[/(]", str(equation.source_info.name_stack).rstrip(")"))[-1]
