"""The boundary around the methods of nnx modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.boundary import Arguments, cast_outputs, signature_without_self
from mpmodules.calls.defined_in import is_flax, is_upstream, package_of
from mpmodules.calls.instance_methods import InstanceMethod
from mpmodules.calls.own_code import run_inside, run_layer
from mpmodules.calls.scan_errors import scan_explained
from mpmodules.nnx._calls import call_under_way, calls
from mpmodules.nnx._foreign import in_compute_dtype
from mpmodules.nnx._own_code import call, is_kept_port, is_layer, keeps, policy_of_outermost
from mpmodules.nnx._registry import LAYER_OF, crossing_of
from mpmodules.nnx._resolution import effective_policy, in_policy, warn_of_scope
from mpmodules.tracing.nnx_names import PATH, name_scope, note_island
from policy.core import boundary
from policy.core.islands import as_in_force
from policy.core.matmul_precision import multiplying
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import current_scope, enter
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
    scope = current_scope()
    if scope.traces_own_code:
        with marks.numbered_call(calls.inside):
            return _run_in_trace(module, method, args, kwargs)
    policy = policy_of_outermost(module, method.is_upstream)
    if policy is None:
        with own_code.keeping() if is_kept_port(module) else contextlib.nullcontext():
            return _run_method(module, method, args, kwargs)
    plainly = functools.partial(_run_method, module, method, args, kwargs)

    def body(copy: Any, *args: Any, **kwargs: Any) -> Any:
        return run_method(copy, method, args, kwargs)

    return call(module, method.name, args, kwargs, policy, body=body, plainly=plainly)


def _run_in_trace(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module in a trace of the code around it."""
    scope, policy = current_scope(), as_in_force(module.dtype_policy, current_scope())
    if not (is_layer(module, method.is_upstream) or keeps(module)):
        source = module._policy_source.for_those_inside(type(module).__name__)
        with call_under_way(module):
            return run_inside(lambda: method.body(module, *args, **kwargs), scope, policy, source)
    crossing = crossing_of(module, method.name)

    def run() -> Any:
        given = args, kwargs
        if policy is not None and not own_code.come_wide(module, args):
            given = _cast_inputs(module, policy, method, args, kwargs)
        with own_code.keeping() if keeps(module) else contextlib.nullcontext():
            outputs = _run_method(module, method, *given)
        if calls.note_run is not None:
            calls.note_run(module, *given, outputs)
        return outputs

    has_carry = crossing.returns_carry(module, kwargs)
    return run_layer(run, scope, crossing.given_carry(args, kwargs) if has_carry else None)


def _cast_inputs(
    module: Any, policy: Policy, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    return crossing_of(module, method.name).cast_inputs(
        policy,
        args,
        kwargs,
        keep=getattr(type(module), "keep_inputs", ()),
        signature=lambda: signature_without_self(method.signature_of),
    )


def _run_method(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scope, cls = current_scope(), type(module)
    effective = effective_policy(module, scope)
    policy, crossing = effective.policy, crossing_of(module, method.name)
    if scope.in_full_precision:
        note_island(module, policy)
    if not calls.depth:
        warn_of_scope(module, scope)
    if cls._is_layer:
        crosses = boundary.layer_crosses(scope, policy, effective.own)
    else:
        crosses = boundary.module_crosses(scope, policy)
    if policy is not None and crosses and not (cls._is_layer and cls._takes_inputs_as_they_come):
        args, kwargs = _cast_inputs(module, policy, method, args, kwargs)
    inner = boundary.inside(scope, policy) if crosses and policy is not None else scope
    source = effective.source.for_those_inside(cls.__name__) if crosses else None
    explained = _scan_carries_explained(module, crosses, effective)
    precise = multiplying(policy, scope.policy if scope.boundary_open else None)
    with call_under_way(module) as caller, explained, enter(inner, source), precise:
        outputs = _run_body(module, method, effective, crosses, args, kwargs)
    if policy is not None:
        outputs = crossing.keep_carry(outputs, args, kwargs)
    has_carry = crossing.returns_carry(module, kwargs)
    if crosses and policy is not None:
        outputs = cast_outputs(boundary.returns(scope, policy), outputs, has_carry=has_carry)
    if caller is None or caller is module or scope.policy is None or not module._casts_outputs:
        return outputs
    return in_compute_dtype(scope.policy, outputs, has_carry=has_carry)


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
        return view._call_layer(effective, crosses, method.body, args, kwargs)
    return method.body(view, *args, **kwargs)


def _scan_carries_explained(
    module: Any, crosses: bool, effective: Effective
) -> AbstractContextManager[None]:
    """Notes a boundary, and around the outermost call adds those inside to JAX's error for a scan's
    carry.
    """
    if not crosses or effective.policy is None:
        return contextlib.nullcontext()
    if not calls.depth:
        return scan_explained(calls.crossed)
    calls.crossed[type(module).__name__] = effective
    return contextlib.nullcontext()
