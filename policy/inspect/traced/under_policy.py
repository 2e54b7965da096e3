"""A call traced under a policy: through layers that obey it, or through autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from policy.autocasting.parameters import ParamsArgument
from policy.autocasting.transform import autocast
from policy.core.dtypes import INT8
from policy.core.messages import DtypePolicyWarning
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.core.scope import use_policy
from policy.inspect.traced.gradients import Around, as_it_is, traced_call
from policy.programs.dtypes import is_half
from policy.programs.primitives import MATMULS
from policy.programs.reading.walk import walk
from policy.programs.rewriting.upcast import dtype_of
from policy.programs.tracing.trace import Traced

Route = Literal["as written", "scope", "autocast"]


P = TypeVar("P", bound=Any)  # a program, which has a jaxpr


def under_policy(
    trace: Callable[[Around], P],
    policy: Policy | None,
    rules: PolicyRules | None,
    route: Route | None = None,
) -> tuple[P, Route]:
    """Traces a program under a policy, and returns how the policy is applied.

    A policy of half precision is applied by its scope, or, where that makes no matmul half
    precision, by autocast. None traces the program as it is written.

    Args:
      trace: traces the program, with the traced function wrapped by its argument.
      policy, rules: what to trace under.
      route: "scope" or "autocast", where that is known.
    """
    if policy is None:
        return trace(as_it_is), "as written"
    if route != "autocast":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DtypePolicyWarning)
            with use_policy(policy, rules):
                program = trace(as_it_is)
        is_float32 = is_half(policy.compute_dtype) and not multiplies_in_half(program.jaxpr)
        if route == "scope" or not is_float32:
            for warning in caught:
                warnings.warn(warning.message, warning.category, stacklevel=5)
            return program, "scope"
    return trace(lambda fn, params: autocast(fn, policy, params=params, rules=rules)), "autocast"


def traced_under(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backward: bool,
    params: ParamsArgument,
    policy: Policy | None,
    rules: PolicyRules | None,
    route: Route | None = None,
) -> tuple[Traced, Route]:
    """Traces a call under a policy, as `traced_call` and `under_policy` do."""
    return under_policy(
        lambda around: traced_call(fn, args, kwargs, backward, params, around),
        policy,
        rules,
        route,
    )


def multiplies_in_half(jaxpr: Any) -> bool:
    """Returns whether a program has a matmul or convolution of half operands, or of 8-bit ones."""
    return any(
        site.name in MATMULS
        and any(
            is_half(d) or d == INT8 for d in map(dtype_of, site.equation.invars) if d is not None
        )
        for site in walk(jaxpr)
    )
