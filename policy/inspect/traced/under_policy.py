"""A call traced under a policy: through layers that obey it, or through autocast."""

from __future__ import annotations

import warnings
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.autocasting.transform import autocast
from policy.core.policy import Policy
from policy.core.precedence import DtypePolicyWarning
from policy.core.rules import PolicyRules
from policy.core.scope import use_policy
from policy.inspect.traced.call import Route, multiplies_in_half
from policy.inspect.traced.gradients import traced_call
from policy.programs.trace import Traced
from policy.programs.upcast import is_half


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
    """Traces a call under a policy, as `traced_call` does, and returns how the policy is applied.

    A policy of half precision is applied by its scope, or, where that makes no matmul half
    precision, by autocast. None traces the call as it is written.

    Args:
      route: "scope" or "autocast", where that is known.
    """
    if policy is None:
        return traced_call(fn, args, kwargs, backward, params), "as written"
    if route != "autocast":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DtypePolicyWarning)
            with use_policy(policy, rules):
                traced = traced_call(fn, args, kwargs, backward, params)
        is_float32 = is_half(policy.compute_dtype) and not multiplies_in_half(traced.jaxpr)
        if route == "scope" or not is_float32:
            for warning in caught:
                warnings.warn(warning.message, warning.category, stacklevel=4)
            return traced, "scope"
    ruled = lambda pure, of: autocast(pure, policy, params=of, rules=rules)  # noqa: E731
    return traced_call(fn, args, kwargs, backward, params, ruled), "autocast"
