"""A call of an nnx module: who is outermost, what is cast, and the boundary around each method."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.boundary import PLAIN, Arguments, LayerCall, cast_outputs, explain_scan
from mpmodules.calls.boundary import nnx_calls as calls
from mpmodules.calls.classes import (
    CALLERS,
    LAYER_OF,
    InstanceMethod,
    calls_users,
    crossing_of,
    is_flax,
    is_ours,
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

# Public methods of a module that are never a boundary: their dtypes are the carry's and the cache's
# own.
NOT_BOUNDARIES = frozenset({"initialize_carry", "init_cache", "set_view", "train", "eval"})
_FLAX_METHODS = frozenset(dir(flax_nnx.Module)) - {"__call__"}


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A public method of a module.

    Attributes:
      body: the method without a boundary.
      name: the name that it has in its class.
      is_upstream: whether it is Flax's own, or ours in its place.
      signature_of: the function whose signature names the arguments, `self` first.
    """

    body: Callable[..., Any]
    name: str
    is_upstream: bool
    signature_of: Any


# --------------------------------------------------------------------------------------------------
# Whose code runs, and who is calling
# --------------------------------------------------------------------------------------------------


def keeps(module: Any) -> bool:
    """Returns whether a module's own code runs in the dtypes that it meets."""
    return getattr(type(module), "own_code", None) == "keep" or is_kept_port(module)


def is_kept_port(module: Any) -> bool:
    """Returns whether a module is part of a port that was asked to keep its own code."""
    return module._ported_code == "keep"


def is_layer(module: Any, is_upstream: bool) -> bool:
    """Returns whether a method is that of a layer which obeys policies itself.

    Args:
      module: the module.
      is_upstream: whether the method is Flax's own, or ours in its place.
    """
    if not (is_upstream and is_ours(type(module))):
        return False
    if layer_class(type(module)) is None and package_of(type(module)) != "mpmodules":
        return False
    return not (isinstance(module, CALLERS) and calls_users(module))


def _outermost(module: Any, method: Method) -> Policy | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    scope, captured = current_scope(), module.dtype_policy
    if scope.keeps_own_code or not isinstance(captured, Policy):
        return None
    if is_layer(module, method.is_upstream) or keeps(module):
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


def run_method(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method of `module` under the policy that the module carries.

    Every call of a public method of a module that obeys policies comes through here, ours or
    ported.

    Args:
      module: the module.
      method: the method.
      args, kwargs: its arguments.
    """
    if method.name == "__call__" and PATH in vars(module):
        with name_scope(module):
            return _run_outermost_or_inside(module, method, args, kwargs)
    return _run_outermost_or_inside(module, method, args, kwargs)


def _run_outermost_or_inside(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if current_scope().traces_own_code:
        with marks.numbered_call(calls.inside):
            return _run_in_trace(module, method, args, kwargs)
    policy = _outermost(module, method)
    if policy is None:
        with own_code.keeping() if is_kept_port(module) else contextlib.nullcontext():
            return _run_method(module, method, args, kwargs)
    plainly = functools.partial(_run_method, module, method, args, kwargs)

    def body(copy: Any, *args: Any, **kwargs: Any) -> Any:
        return run_method(copy, method, args, kwargs)

    return call_traced(module, method.name, args, kwargs, policy, body=body, plainly=plainly)


def _run_in_trace(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module in a trace of the code around it."""
    scope = current_scope()
    policy = scope.held(module.dtype_policy)
    if not (is_layer(module, method.is_upstream) or keeps(module)):
        source = module._policy_source.for_those_inside(type(module).__name__)
        with _under_way():
            run = lambda: method.body(module, *args, **kwargs)  # noqa: E731
            return own_code.run_inside(run, scope, policy, source)
    crossing = crossing_of(type(module), method.name)

    def run_layer() -> Any:
        given = args, kwargs
        if policy is not None and not own_code.come_wide(module, args):
            given = _cast_inputs(module, policy, method, args, kwargs)
        with own_code.keeping() if keeps(module) else contextlib.nullcontext():
            outputs = _run_method(module, method, *given)
        if calls.recorded is not None:
            calls.recorded(module, *given, outputs)
        return outputs

    _, carry = crossing.carry_of(module, args, kwargs)
    return own_code.run_layer(run_layer, scope, carry)


def _cast_inputs(
    module: Any, policy: Policy, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    keep = getattr(type(module), "keep_inputs", ())
    crossing = crossing_of(type(module), method.name)
    return crossing.cast_inputs(policy, args, kwargs, keep=keep, method=method.signature_of)


def _run_method(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scope, cls = current_scope(), type(module)
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
        if not (cls._is_layer and cls._takes_inputs_as_they_come):
            args, kwargs = _cast_inputs(module, entered, method, args, kwargs)
    precise = multiplying(policy, scope.policy if scope.boundary_open else None)
    with _under_way(), enter(inner, source), precise:
        try:
            outputs = _run_body(module, method, effective, crosses, args, kwargs)
        except TypeError as error:
            explain_scan(error)
            raise
    crossing = crossing_of(cls, method.name)
    if policy is not None and crossing is not PLAIN:
        outputs = crossing.keep_carry(outputs, args, kwargs)
    has_carry = crossing.returns_carry(module, kwargs)
    if entered is None:
        return outputs
    return cast_outputs(scope.returned(entered), outputs, has_carry=has_carry)


def _run_body(
    module: Any,
    method: Method,
    effective: Effective,
    crosses: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a method without its boundary.

    Flax's own sees a module that computes as the policy says.
    """
    if not method.is_upstream:
        return method.body(module, *args, **kwargs)
    view = in_policy(module, effective.policy)
    if view._is_layer:
        return view._call_layer(LayerCall(effective, crosses, method.body, args, kwargs))
    return method.body(view, *args, **kwargs)


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
        if not (_is_boundary_name(name) and _computes(owner, name)):
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


def _is_boundary_name(name: str) -> bool:
    """Returns whether a method of that name is public, and no method of every module."""
    return (
        (name == "__call__" or not name.startswith("_"))
        and name not in _FLAX_METHODS
        and name not in NOT_BOUNDARIES
    )


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

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nnx.Module):
            return method(self, *args, **kwargs)
        body = (
            method
            if is_function
            else lambda self, *args, **kwargs: method.__get__(self)(*args, **kwargs)
        )
        return run_method(self, Method(body, name, is_upstreams, method), args, kwargs)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call
