"""Outermost calls of linen modules: own code is traced as a pure function and evaluated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as flax_nn
import jax

from mpmodules.calls import own_code
from mpmodules.calls.layer_classes import crossing_of
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._half_states import made_as_stored
from mpmodules.linen._instances import key_of
from mpmodules.linen._pure_calls import Method, lifted
from policy.core.precedence import Effective
from policy.core.scope import current_scope, enter, multiplying


def call_traced(
    module: Any,
    method: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    effective: Effective,
    *,
    plainly: Callable[..., Any],
) -> Any:
    """Calls an outermost method, whose own code obeys a policy.

    Args:
      module: the module, bound.
      method: the function that Flax wraps.
      args, kwargs: its arguments.
      effective: the module's policy.
      plainly: calls the method with arguments, without a trace.
    """
    scope, policy = current_scope(), effective.policy
    assert policy is not None
    # The module is cloned for the trace, without the modules around it.
    with enter(dataclasses.replace(scope, policy=policy)), multiplying(policy, scope.policy):
        if module.is_initializing():  # shapes and dtypes as in a call; nothing else is of interest
            with own_code.tracing(), made_as_stored([module.scope]):
                args, kwargs = own_code.in_float32((args, kwargs))
                outputs = plainly(*args, **kwargs)
        else:
            key = _key(module, method)
            run = functools.partial(own_code.run, type(module), policy=policy, key=key)
            try:
                outputs = lifted(method, run)(module, args, kwargs)
            except own_code.CANNOT_BE_TRACED as error:
                with enter(scope):
                    return own_code.run_kept(type(module), error, lambda: plainly(*args, **kwargs))
    name = getattr(method, "__name__", "")
    suffix = "" if name == "__call__" else f".{name}"
    with jax.named_scope(f"{module.name or type(module).__name__}{suffix}"):
        carry = crossing_of(type(module), name).carry_of(module, args, kwargs)
        return own_code.outputs_of(scope, policy, outputs, *carry)


@functools.lru_cache(1024)
def wrapped_once(function: Callable[..., Any]) -> Method:
    """Returns a method as Flax wraps it, the same at every call."""
    return flax_nn.module.wrap_method_once(function)


def _key(module: Any, method: Method) -> Hashable:
    """Returns a key of the programs of a call, or None where they are not kept.

    They are where no summary, no capture and nobody's interceptor takes part in the call, and no
    check of rules.
    """
    flaxs, interceptors = flax_nn.module._context, flax_nn.module._global_interceptor_stack
    if any(flaxs.capture_stack[-1:]) or flaxs.call_info_stack:
        return None
    if calls.recorded is not None or calls.seen is not None:
        return None
    if not all(getattr(each, "is_of_a_port", False) for each in interceptors):
        return None
    try:
        return "linen", method, key_of(module), bool(calls.paths)
    except (TypeError, RecursionError):  # the second of an object that holds itself in a dict
        return None
