"""A user's own code in linen modules: its outermost calls are traced as pure functions, and its
parameters stored and read as the policy says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from jax.typing import DTypeLike

from mpmodules.calls import own_code
from mpmodules.calls.arguments import warn_of_unknown_names
from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.boundary import linen_calls as calls
from mpmodules.linen._resolution import effective_policy, where
from mpmodules.tracing.linen_pure_calls import Method, lifted, made_as_stored
from policy.core.arrays import (
    cast_floating,
    is_floating,
)
from policy.core.precedence import Effective
from policy.core.scope import current_scope, enter, multiplying


def call_traced(call: MethodCall, effective: Effective, *, plainly: Callable[..., Any]) -> Any:
    """Calls an outermost method, whose own code obeys a policy.

    Args:
      call: the call, of the function that Flax wraps.
      effective: the module's policy.
      plainly: calls the method with arguments, without a trace.
    """
    scope, policy, module, name = current_scope(), effective.policy, call.module, call.name
    assert policy is not None
    # The module is cloned for the trace, without the modules around it.
    with enter(dataclasses.replace(scope, policy=policy)), multiplying(policy, scope.policy):
        if module.is_initializing():  # shapes and dtypes as in a call; nothing else is of interest
            with own_code.tracing(), made_as_stored([module.scope]):
                args, kwargs = own_code.in_float32((call.args, call.kwargs))
                call = call._replace(args=args, kwargs=kwargs)
                outputs = plainly(*args, **kwargs)
        else:
            key = _key(module, call.method)
            run = functools.partial(own_code.run, type(module), policy=policy, key=key)
            try:
                outputs = lifted(call.method, run)(module, call.args, call.kwargs)
            except own_code.CANNOT_BE_TRACED as error:
                with enter(scope):
                    kept = functools.partial(plainly, *call.args, **call.kwargs)
                    return own_code.run_kept(type(module), error, kept)
    suffix = "" if name == "__call__" else f".{name}"
    with jax.named_scope(f"{module.name or type(module).__name__}{suffix}"):
        return own_code.outputs_of(call, scope, policy, outputs)


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
        return "linen", method, own_code.key_of(module, {}), bool(calls.paths)
    except (TypeError, RecursionError):  # the second of an object that holds itself in a dict
        return None


# --------------------------------------------------------------------------------------------------
# Parameters that a module creates itself, with `self.param`
# --------------------------------------------------------------------------------------------------


def param(
    self: Any,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    unbox: bool = True,
    compute_dtype: DTypeLike | None = None,
    **init_kwargs: Any,
) -> Any:
    """Declares a parameter. Under a policy, it is stored in param_dtype.

    Args:
      name, init_fn, init_args, init_kwargs: as in `flax.linen.Module.param`. Under a policy,
        floating results of `init_fn` are stored in param_dtype.
      unbox: whether a boxed value is returned without its box. Boxed ones are returned as stored.
      compute_dtype: the dtype to read it in; None for the policy's. A policy must be in force.

    Returns:
      The parameter: float32 in code that a half-precision policy evaluates, else as stored. Its
      gradient is summed in float32 and returned in the dtype that it is stored in.
    """
    cls = type(self)
    is_kept = name in cls.keep_params
    policy = effective_policy(self, current_scope()).policy
    init = init_fn
    if policy is not None and not is_kept and not self.has_variable("params", name):
        param_dtype = policy.param_dtype

        def init(*args: Any, **kwargs: Any) -> Any:  # boxed results too
            return cast_floating(init_fn(*args, **kwargs), param_dtype)

    stored = flax_nn.Module.param(self, name, init, *init_args, unbox=unbox, **init_kwargs)
    if policy is None or (not unbox and isinstance(stored, meta.AxisMetadata)):
        return stored
    if current_scope().traces_own_code:
        read = functools.partial(own_code.as_read, is_kept=is_kept, dtype=compute_dtype)
        return jax.tree.map(read, stored)
    if compute_dtype is None or not calls.paths:
        return stored
    return cast_floating(stored, compute_dtype)


def check_names(module: Any) -> None:
    """Warns of names in `keep_params` that a module, just initialised, has no parameter of."""
    if module.is_initializing():
        warn_of_unknown_names(type(module), own_params(module), f"'{where(module)}'")


def own_params(module: Any) -> dict[str, Any]:
    """Returns the floating parameters that a bound module holds itself, as stored.

    Those of modules in it are none.
    """
    params = module.scope.variables().get("params", {})
    return {
        name: value
        for name, value in params.items()
        if not isinstance(value, Mapping) and any(map(is_floating, jax.tree.leaves(value)))
    }
