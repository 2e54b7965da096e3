"""Outermost calls of linen modules: own code is traced as a pure function and evaluated."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import flax.linen as flax_nn
import jax

from mpmodules.calls import own_code
from mpmodules.calls.defined_in import is_upstream
from mpmodules.linen._calls import calls
from mpmodules.linen._half_states import made_as_stored
from mpmodules.linen._instances import key_of
from mpmodules.linen._pure_calls import Method, lifted
from mpmodules.linen._registry import crossing_of, obeys_policies
from mpmodules.linen._resolution import effective_policy
from policy.core.matmul_precision import multiplying
from policy.core.policy import Policy
from policy.core.scope import current_scope, enter

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
NOT_BOUNDARIES = frozenset({"setup", "initialize_carry", "init_cache"})
_FLAX_METHODS = frozenset(dir(flax_nn.Module)) - {"__call__"}


@functools.cache
def is_library(method: Callable[..., Any]) -> bool:
    """Returns whether a method is Flax's or ours, also where it is transformed."""
    return is_upstream(inspect.unwrap(method))


def is_layer(module: Any, method: Callable[..., Any]) -> bool:
    """Returns whether a method is that of a layer which obeys policies itself."""
    return obeys_policies(module) and is_layers(module, method)


def is_layers(module: Any, method: Callable[..., Any]) -> bool:
    """Returns whether a method is Flax's or ours, of a module that runs no code of a user's."""
    if not is_library(method):
        return False
    is_container = isinstance(module, flax_nn.Sequential)
    return not is_container and all(map(is_library, _cells_of(module)))


def _cells_of(module: Any) -> Iterator[Callable[..., Any]]:
    """Yields the methods of the cells that a loop calls."""
    if isinstance(module, flax_nn.Bidirectional):
        yield from _cells_of(module.forward_rnn)
        yield from _cells_of(module.backward_rnn)
    elif isinstance(module, flax_nn.RNN):
        yield type(module.cell).__call__


def policy_of_outermost(module: Any, method: Method) -> Policy | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    scope, name = current_scope(), getattr(method, "__name__", "")
    if scope.traces_own_code or scope.keeps_own_code or module.scope is None:
        return None
    if name in NOT_BOUNDARIES | _FLAX_METHODS or (name.startswith("_") and name != "__call__"):
        return None
    if getattr(type(module), "own_code", None) == "keep" or is_layer(module, method):
        return None
    policy = effective_policy(module, scope).policy
    return policy if own_code.decides(scope, policy, scope.rules) else None


def call(
    module: Any,
    method: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    *,
    plainly: Callable[..., Any],
) -> Any:
    """Calls an outermost method, whose own code obeys `policy`.

    Args:
      module: the module, bound.
      method: the function that Flax wraps.
      args, kwargs: its arguments.
      policy: the module's.
      plainly: calls the method with arguments, without a trace.
    """
    scope = current_scope()
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
    crossing = crossing_of(module, name)
    calls.crossed["/".join(module.path)] = effective_policy(module, scope)
    suffix = "" if name == "__call__" else f".{name}"
    with jax.named_scope(f"{module.name or type(module).__name__}{suffix}"):
        return own_code.outputs_of(
            scope,
            policy,
            outputs,
            crossing=crossing,
            has_carry=crossing.returns_carry(module, kwargs),
            args=args,
            kwargs=kwargs,
        )


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
        return "linen", method, key_of(module), calls.model, bool(calls.paths)
    except (TypeError, RecursionError):  # the second of an object that holds itself in a dict
        return None
