"""A call of an nnx module: who is outermost, what is cast, and the boundary around each method."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.boundary import MethodCall, run_at_boundary
from mpmodules.calls.boundary import nnx_calls as calls
from mpmodules.calls.classes import (
    CALLERS,
    LAYER_OF,
    InstanceMethod,
    calls_users,
    is_flax,
    is_ours,
    is_public,
    is_upstream,
    layer_class,
    package_of,
)
from mpmodules.nnx._own_code import call_traced
from mpmodules.nnx._resolution import effective_policy, in_policy, warn_of_scope
from mpmodules.tracing.names import PATH, name_scope, note_island
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import computes_in_half, current_scope, enter, multiplying
from policy.programs import marks

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
_NOT_BOUNDARIES = (
    frozenset({"initialize_carry", "init_cache", "set_view", "train", "eval"})
    | frozenset(dir(flax_nnx.Module))
) - {"__call__"}


# --------------------------------------------------------------------------------------------------
# Whose code runs, and who is calling
# --------------------------------------------------------------------------------------------------


def _keeps(module: Any) -> bool:
    """Returns whether a module's own code runs in the dtypes that it meets."""
    return getattr(type(module), "own_code", None) == "keep" or _is_kept_port(module)


def _is_kept_port(module: Any) -> bool:
    """Returns whether a module is part of a port that was asked to keep its own code."""
    return module._ported_code == "keep"


def _is_layer(call: MethodCall) -> bool:
    """Returns whether a method is that of a layer which obeys policies itself."""
    module, cls = call.module, type(call.module)
    if not (call.is_upstream and is_ours(cls)):
        return False
    if layer_class(cls) is None and package_of(cls) != "mpmodules":
        return False
    return not (isinstance(module, CALLERS) and calls_users(module))


def _outermost(call: MethodCall) -> Policy | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    scope, captured = current_scope(), call.module.dtype_policy
    if scope.keeps_own_code or not isinstance(captured, Policy):
        return None
    if _is_layer(call) or _keeps(call.module):
        return None
    policy = scope.held(captured)
    return policy if computes_in_half(policy) else None


@contextlib.contextmanager
def _under_way() -> Iterator[None]:
    """Counts the call of a module for a block."""
    inside, calls.inside = calls.inside, 0
    calls.depth += 1
    try:
        yield
    finally:
        calls.inside = inside + 1
        calls.depth -= 1


# --------------------------------------------------------------------------------------------------
# Methods under the policy of their module
# --------------------------------------------------------------------------------------------------


def run_method(call: MethodCall) -> Any:
    """Calls a method under the policy that its module carries.

    Every call of a public method of a module that obeys policies comes through here, ours or
    ported.
    """
    if call.name == "__call__" and PATH in vars(call.module):
        with name_scope(call.module):
            return _run_outermost_or_inside(call)
    return _run_outermost_or_inside(call)


def _run_outermost_or_inside(call: MethodCall) -> Any:
    if current_scope().traces_own_code:
        with marks.numbered_call(calls.inside):
            return _run_in_trace(call)
    policy = _outermost(call)
    if policy is None:
        with own_code.keeping() if _is_kept_port(call.module) else contextlib.nullcontext():
            return _run_method(call)
    return call_traced(call, policy, run=run_method, plainly=lambda: _run_method(call))


def _run_in_trace(call: MethodCall) -> Any:
    """Calls a module in a trace of the code around it."""
    module, scope, keeps = call.module, current_scope(), _keeps(call.module)
    policy = scope.held(module.dtype_policy)
    if keeps or _is_layer(call):
        return own_code.run_layer(call, _run_method, policy, keeps=keeps, recorded=calls.recorded)
    source = module._policy_source.for_those_inside(type(module).__name__)
    with _under_way():
        return own_code.run_inside(functools.partial(call.run, module), scope, policy, source)


def _run_method(call: MethodCall) -> Any:
    module, scope, cls = call.module, current_scope(), type(call.module)
    effective = effective_policy(module, scope)
    policy = effective.policy
    if scope.in_full_precision and PATH in vars(module):
        note_island(module, policy)
    if not calls.depth and scope.policy is not None and scope.policy != module.dtype_policy:
        warn_of_scope(module, scope)
    # A bare layer is a boundary only by a policy of its own.
    crosses = scope.crosses(policy) and (effective.source.own or not cls._is_layer)
    entered, inner, source = policy if crosses else None, scope, None
    if entered is not None:
        inner, source = scope.inside(entered), effective.source.for_those_inside(cls.__name__)
    precise = multiplying(policy, scope.policy if scope.boundary_open else None)

    def run(given: MethodCall) -> Any:
        with _under_way(), enter(inner, source), precise:
            return _run_body(given, effective, crosses)

    return run_at_boundary(call, run, policy=policy, entered=entered)


def _run_body(call: MethodCall, effective: Effective, crosses: bool) -> Any:
    """Runs a method without its boundary.

    Flax's own sees a module that computes as the policy says.
    """
    if not call.is_upstream:
        return call.run(call.module)
    view = in_policy(call.module, effective.policy)
    if view._is_layer:
        return view._call_layer(call._replace(effective=effective, crosses=crosses))
    return call.run(view)


# --------------------------------------------------------------------------------------------------
# Boundaries of a class
# --------------------------------------------------------------------------------------------------


def install_boundaries(cls: Any, *, is_port: bool = False) -> None:
    """Puts the boundary around each public method that `cls` adds, transformed ones (nnx.jit,
    nnx.remat) included.

    Args:
      cls: the class.
      is_port: whether it is a port's, whose methods look like those of the class ported.
    """
    owners = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
    for name, owner in owners.items():
        if not is_public(name) or name in _NOT_BOUNDARIES or not _computes(owner, name):
            continue
        method = inspect.getattr_static(cls, name)
        if not _is_method(method) or method.__dict__.get("_policy_boundary") is method:
            continue
        bounded = _with_boundary(method, name)
        setattr(cls, name, InstanceMethod(method, bounded) if is_port else bounded)


def _computes(owner: type, name: str) -> bool:
    """Returns whether a public method may compute: those of Python's own classes, such as Mapping,
    do not, and of Flax's classes that are no layers only ``__call__`` does.
    """
    if is_flax(owner):
        return owner in LAYER_OF or name == "__call__"
    return issubclass(owner, flax_nnx.Module) or package_of(owner) not in sys.stdlib_module_names


def _is_method(attribute: Any) -> bool:
    """Returns whether an attribute of a class is a method, transformed ones included."""
    if inspect.isfunction(attribute):
        return True
    if isinstance(attribute, staticmethod | classmethod | property | type | functools.partial):
        return False
    # A transformed method, such as nnx.jit makes: callable, binds like a function, and wraps one.
    return (
        callable(attribute) and hasattr(attribute, "__get__") and hasattr(attribute, "__wrapped__")
    )


def _with_boundary(method: Any, name: str) -> Callable[..., Any]:
    is_function = inspect.isfunction(method)
    is_upstreams = is_function and is_upstream(method)

    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(self)(*args, **kwargs)

    body = method if is_function else bound

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nnx.Module):
            return method(self, *args, **kwargs)
        return run_method(MethodCall(self, body, args, kwargs, name, is_upstreams, method))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call
