"""A call of a linen module: who is outermost, what is cast, and the boundary around each method."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_nn

from mpmodules.calls import own_code
from mpmodules.calls.boundary import MethodCall, run_at_boundary
from mpmodules.calls.boundary import linen_calls as calls
from mpmodules.calls.classes import (
    CALLERS,
    calls_users,
    is_library,
    is_ours,
    is_public,
    is_upstream,
)
from mpmodules.linen._own_code import call_traced
from mpmodules.linen._resolution import (
    check_rules,
    effective_policy,
    fields_set,
    model_of,
    plain_fields,
    where,
)
from mpmodules.tracing.linen_pure_calls import put_back_for_layer, states_made_in_float32
from policy.core.policy import Policy
from policy.core.precedence import Effective, note_obeyed
from policy.core.scope import Scope, computes_in_half, current_scope, enter, multiplying
from policy.programs.paths import joined
from policy.programs.thread import thread

Method = Callable[..., Any]

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
NOT_ENTERED = frozenset({"initialize_carry", "init_cache"})
_NOT_BOUNDARIES = (NOT_ENTERED | frozenset(dir(flax_nn.Module))) - {"__call__"}


def call_of(
    module: Any,
    method: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_upstream: bool = True,
    is_lifted: bool = False,
) -> MethodCall:
    """Returns a call of a method; a `functools.partial` has no name."""
    name = getattr(method, "__name__", "")
    return MethodCall(module, method, args, kwargs, name, is_upstream, method, is_lifted)


def is_boundary_name(name: str) -> bool:
    """Returns whether a method of that name is public, and no method of every module."""
    return is_public(name) and name not in _NOT_BOUNDARIES


# --------------------------------------------------------------------------------------------------
# Whose code runs, and who is calling
# --------------------------------------------------------------------------------------------------


def _is_layer(call: MethodCall) -> bool:
    """Returns whether a method is that of a layer which obeys policies itself."""
    return is_ours(type(call.module)) and is_layers(call)


def is_layers(call: MethodCall) -> bool:
    """Returns whether a method is Flax's or ours, of a module that runs no code of a user's."""
    module = call.module
    return is_library(call.method) and not (isinstance(module, CALLERS) and calls_users(module))


def _keeps(module: Any) -> bool:
    """Returns whether a module's class keeps its own code out of a trace."""
    return getattr(type(module), "own_code", None) == "keep"


def outermost(call: MethodCall) -> Effective | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    scope, module = current_scope(), call.module
    if scope.traces_own_code or scope.keeps_own_code or module.scope is None:
        return None
    if _is_layer(call) or _keeps(module) or not is_boundary_name(call.name):
        return None
    effective = effective_policy(module, scope)
    return effective if computes_in_half(effective.policy, scope.rules) else None


def is_innermost(module: flax_nn.Module) -> bool:
    """Returns whether the innermost call under way is of this instance, or of one that it stands in
    for.
    """
    return calls.innermost is not None and calls.innermost._state is module._state


@contextlib.contextmanager
def _under_way(module: Any, scope: Scope) -> Iterator[None]:
    """Notes the call, and after a root's call refuses rules that matched nothing in it."""
    path = module.path
    is_root = not path and calls.seen is None
    of_root: dict[str, Any] = {"seen": {}, "root": module} if is_root else {}
    with calls.noting(innermost=module, paths=[*calls.paths, path], **of_root):
        if calls.seen is not None:
            calls.seen.setdefault(path, set()).add(type(module))
        yield
        if is_root and scope.rules:
            check_rules(module, scope.rules)


# --------------------------------------------------------------------------------------------------
# Methods and setups under the policy of their module
# --------------------------------------------------------------------------------------------------


def run_method(call: MethodCall) -> Any:
    """Calls a method under the policy that its module obeys."""
    module, scope, cls = call.module, current_scope(), type(call.module)
    if call.is_lifted and (effective := outermost(call)) is not None:
        return call_traced(call, effective, plainly=functools.partial(call.method, module))
    effective = effective_policy(module, scope)  # before the call is noted: who is calling decides
    policy, is_bare = effective.policy, getattr(cls, "_is_layer", False)
    if thread.asked is not None or calls.recorded is not None:
        _note_obeyed(module, effective)
    with _under_way(module, scope):
        if scope.traces_own_code:
            return _run_in_trace(call, effective)
        # A bare layer is a boundary only by a policy of its own.
        crosses = scope.crosses(policy if is_bare else effective.base)
        entered = policy if crosses and (effective.source.own or not is_bare) else None
        inner = _scope_inside(scope, policy, entered is not None)
        source = effective.source.for_those_inside(where(module))

        def run(given: MethodCall) -> Any:
            with enter(inner, source), multiplying(policy, scope.policy):
                if call.is_upstream and not call.is_lifted and getattr(cls, "_dtype_fields", False):
                    returns = entered is not None and is_bare
                    return module._call_layer(given._replace(effective=effective, crosses=returns))
                return _run_users(given, effective)

        return run_at_boundary(call, run, policy=policy, entered=entered)


def _note_obeyed(module: Any, effective: Effective) -> None:
    """Notes the policy that a module obeys in a call, for a summary or a report."""
    if module.scope is not None:
        note_obeyed(model_of(module), joined(module.path), effective.policy)
    if calls.recorded is not None:
        calls.recorded.note(module, effective)


def _scope_inside(scope: Scope, policy: Policy | None, crosses: bool) -> Scope:
    """Returns the scope inside of a module's call."""
    if policy is None:
        return scope
    return scope.inside(policy) if crosses else dataclasses.replace(scope, policy=policy)


def _run_users(call: MethodCall, effective: Effective) -> Any:
    """Calls a method that is no layer's own: where it is one on top of a layer, with the policy's
    dtypes in the layer's fields.
    """
    if call.is_lifted or not getattr(type(call.module), "_dtype_fields", False):
        return call.run(call.module)
    with fields_set(call.module, plain_fields(call.module, effective)):
        return call.run(call.module)


def _run_in_trace(call: MethodCall, effective: Effective) -> Any:
    """Calls a module in a trace of the code around it."""
    module, scope, keeps = call.module, current_scope(), _keeps(call.module)
    if keeps or _is_layer(call):
        put_back_for_layer(module)
        recorded = None if calls.recorded is None else calls.recorded.note_run
        policy = effective.policy
        return own_code.run_layer(call, run_method, policy, keeps=keeps, recorded=recorded)

    def run_own_code() -> Any:
        with states_made_in_float32(module):
            return _run_users(call, effective)

    source = effective.source.for_those_inside(where(module))
    return own_code.run_inside(run_own_code, scope, effective.base, source)


def run_setup(module: Any, setup: Callable[[], Any]) -> Any:
    """Runs a module's setup under its policy, whichever entry reaches it: parameters made there
    need their dtype. A layer's fields are as the policy wants them.
    """
    scope = current_scope()
    effective = effective_policy(module, scope)
    if getattr(type(module), "_is_layer", False):
        with fields_set(module, module._policy_fields(effective.policy)):
            return setup()
    inner = _scope_inside(scope, effective.policy, scope.crosses(effective.base))
    traces = scope.traces_own_code and not _keeps(module)
    states = states_made_in_float32(module) if traces else contextlib.nullcontext()
    with enter(inner, effective.source.for_those_inside(where(module))), states:
        return setup()


# --------------------------------------------------------------------------------------------------
# Boundaries of a class
# --------------------------------------------------------------------------------------------------


def install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, and around its setup.

    Interceptors and summaries of Flax see the uncast inputs and the final outputs: its machinery is
    outside of the boundary. A class made by nn.scan, nn.remat, nn.jit, ... copies the attributes of
    the method that it transforms, our mark included. A mark that points to another function
    therefore identifies such a method, which gets a boundary outside of the transform.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    names = {name for base in cls.__mro__ if base is not object for name in vars(base)}
    for name in names - fields:
        if not is_boundary_name(name) and name != "setup":
            continue
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method) or hasattr(method, "nowrap"):
            continue
        if method is inspect.getattr_static(flax_nn.Module, name, None):
            # A wrapped copy here would come before the layer's own in the order of inheritance.
            continue
        mark = method.__dict__.get("_policy_boundary")
        if mark is not method:
            is_setup, lifted = name == "setup", mark is not None
            setattr(cls, name, _around_setup(method) if is_setup else _bounded(method, lifted))


def _bounded(method: Method, lifted: bool) -> Method:
    """Puts a boundary around a method: inside of Flax's wrapper, unless it is a transformed one."""
    wrapped = getattr(method, "__wrapped__", None)
    transformed = lifted or hasattr(wrapped, "method_handler_wrapped")
    if wrapped is None or transformed or not hasattr(method, "method_handler_wrapped"):
        return _with_boundary(method, lifted)
    bounded = flax_nn.module.wrap_method_once(_with_boundary(wrapped, False))
    bounded._policy_boundary = bounded  # type: ignore[attr-defined]
    return bounded


def _with_boundary(method: Method, is_lifted: bool) -> Method:
    is_upstreams = not is_lifted and is_upstream(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nn.Module) or self.scope is None:
            # Flax says what is wrong with a call on an unbound module.
            return method(self, *args, **kwargs)
        return run_method(
            call_of(self, method, args, kwargs, is_upstream=is_upstreams, is_lifted=is_lifted)
        )

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def _around_setup(setup: Method) -> Method:
    @functools.wraps(setup)
    def call(self: Any) -> Any:
        return run_setup(self, lambda: setup(self))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call
