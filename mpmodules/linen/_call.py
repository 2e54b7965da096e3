"""A call of a linen module: who is outermost, what is cast, the boundary around each method, and a
user's own code, which is traced as a pure function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from jax.typing import DTypeLike

from mpmodules.calls import boundary, classes, own_code
from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_reference
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._resolution import (
    effective_policy,
    plain_fields,
    under_way,
    viewed,
    where,
)
from mpmodules.tracing.linen_pure_calls import (
    Method,
    half_variables_in_float32,
    run_lifted,
)
from policy.core.arrays import cast_floating
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import Scope, current_scope, enter, multiplying
from policy.programs.tracing.pure_calls import is_eager
from policy.quantized.params import require_trainable

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
NOT_ENTERED = frozenset({"initialize_carry", "init_cache"})
_NOT_BOUNDARIES = (NOT_ENTERED | frozenset(dir(flax_nn.Module))) - {"__call__"}


@functools.cache
def is_boundary_name(name: str) -> bool:
    """Returns whether a method of that name is public, and no method of every module."""
    return classes.is_public(name) and name not in _NOT_BOUNDARIES


# --------------------------------------------------------------------------------------------------
# Methods and setups under the policy of their module
# --------------------------------------------------------------------------------------------------


def _run_layer(call: MethodCall) -> Any:
    module, has_fields = call.module, getattr(type(call.module), "_dtype_fields", False)
    if call.is_lifted or not has_fields:
        return call.method(module, *call.args, **call.kwargs)
    if call.is_upstream:
        return module._call_layer(call)
    with viewed(module, plain_fields(module, call.effective)) as view:
        return call.run(view)


def _run_own_code(call: MethodCall, effective: Effective) -> Any:
    with half_variables_in_float32(call.module):
        return _run_layer(call._replace(effective=effective, is_upstream=False))


LINEN = boundary.Api(
    captures=False,
    effective=effective_policy,
    where=where,
    calls=calls,
    under_way=under_way,
    run_layer=_run_layer,
    run_own_code=_run_own_code,
    run_in_trace=own_code.run_in_trace,
)


def run_method(call: MethodCall) -> Any:
    """Calls a method under the policy that its module obeys."""
    run = functools.partial(boundary.run_method, LINEN)
    if not call.is_lifted:
        return run(call, current_scope())
    method = functools.partial(call.method, call.module)
    return run_outermost(call, method, otherwise=run)


def is_innermost(module: flax_nn.Module) -> bool:
    """Returns whether the innermost call under way is of this instance, or of one that it stands in
    for.
    """
    return calls.innermost is not None and calls.innermost._state is module._state


def run_setup(module: Any, setup: Method) -> Any:
    """Runs a module's setup under its policy, whichever entry reaches it: parameters made there
    need their dtype. A layer's is that of a view with the policy's dtypes.
    """
    scope = current_scope()
    effective = effective_policy(module, scope)
    if getattr(type(module), "_is_layer", False):
        with viewed(module, module._policy_fields(effective.policy)) as view:
            return setup(view)
    inner = scope.within(effective.policy, crosses=scope.crosses(effective.base))
    traces = scope.traces_own_code and not boundary.keeps(module)
    states = half_variables_in_float32(module) if traces else contextlib.nullcontext()
    with enter(inner, effective.source.for_those_inside(where(module))), states:
        return setup(module)


# --------------------------------------------------------------------------------------------------
# Boundaries of a class
# --------------------------------------------------------------------------------------------------


def methods_of(cls: Any) -> dict[str, Any]:
    """Returns the functions of a class of modules and its bases, by name."""
    fields = {field.name for field in dataclasses.fields(cls)}
    names = {name for base in cls.__mro__ if base is not object for name in vars(base)} - fields
    found = ((name, inspect.getattr_static(cls, name)) for name in names)
    return {name: method for name, method in found if inspect.isfunction(method)}


def install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, and around its setup.

    Interceptors and summaries of Flax see the uncast inputs and the final outputs: its machinery is
    outside of the boundary. A class made by nn.scan, nn.remat, nn.jit, ... copies the attributes of
    the method that it transforms, our mark included. A mark that points to another function
    therefore identifies such a method, which gets a boundary outside of the transform.
    """
    for name, method in methods_of(cls).items():
        if hasattr(method, "nowrap") or not (is_boundary_name(name) or name == "setup"):
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
    is_upstreams = not is_lifted and classes.is_upstream(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nn.Module) or self.scope is None:
            # Flax says what is wrong with a call on an unbound module.
            return method(self, *args, **kwargs)
        return run_method(MethodCall(self, method, args, kwargs, is_upstreams, is_lifted))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def _around_setup(setup: Method) -> Method:
    @functools.wraps(setup)
    def call(self: Any) -> Any:
        return run_setup(self, setup)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


# --------------------------------------------------------------------------------------------------
# A user's own code, traced as a pure function
# --------------------------------------------------------------------------------------------------


def run_outermost(
    call: MethodCall,
    plainly: Callable[..., Any],
    *,
    otherwise: Callable[[MethodCall, Scope], Any] | None = None,
) -> Any:
    """Calls a method; where it is outermost, and its own code obeys a policy, in a trace.

    Args:
      call: the call, of the function that Flax wraps.
      plainly: calls the method with arguments, without a trace.
      otherwise: runs a call that is not outermost; by default `plainly` does.
    """
    scope, effective = current_scope(), None
    if call.module.scope is not None and is_boundary_name(call.name):
        effective = boundary.outermost(LINEN, call, scope)
    if effective is None or effective.policy is None:
        return otherwise(call, scope) if otherwise else plainly(*call.args, **call.kwargs)
    return _run_traced(call, effective.policy, scope, plainly)


def _run_traced(call: MethodCall, policy: Policy, scope: Scope, plainly: Callable[..., Any]) -> Any:
    """Calls an outermost method, whose own code obeys `policy`, in a trace."""
    module, name = call.module, call.name
    # The module is cloned for the trace, without the modules around it.
    with enter(dataclasses.replace(scope, policy=policy)), multiplying(policy, scope.policy):
        if module.is_initializing():  # shapes and dtypes as in a call; nothing else is of interest
            # Own code is in float32, and layers return float32 to it.
            tracing = dataclasses.replace(current_scope(), traces_own_code=True)
            with enter(tracing):
                args, kwargs = own_code.in_float32((call.args, call.kwargs))
                call = call._replace(args=args, kwargs=kwargs)
                outputs = plainly(*args, **kwargs)
        else:
            leaves = jax.tree.leaves((call.args, call.kwargs), is_leaf=is_reference)
            has_references = any(map(is_reference, leaves))
            key = _key(call) if all(map(is_eager, leaves)) else None
            run = functools.partial(own_code.run, type(module), policy=policy, key=key)
            try:
                outputs = run_lifted(call, leaves, run, has_references=has_references)
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


def _key(call: MethodCall) -> Hashable:
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
        return "linen", call.method, own_code.key_of(call.module, {}), bool(calls.paths)
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
    if not classes.is_written_by_user(type(self), flax_nn.Module):  # fields say a layer's dtypes
        return flax_nn.Module.param(self, name, init_fn, *init_args, unbox=unbox, **init_kwargs)
    scope, is_kept = current_scope(), name in type(self).keep_params
    policy = effective_policy(self, scope).policy
    init = init_fn
    if policy is not None and not is_kept and not self.has_variable("params", name):
        param_dtype = policy.param_dtype

        def init(*args: Any, **kwargs: Any) -> Any:  # boxed results too
            return cast_floating(init_fn(*args, **kwargs), param_dtype)

    stored = flax_nn.Module.param(self, name, init, *init_args, unbox=unbox, **init_kwargs)
    if init is not init_fn and calls.recorded is None:
        require_trainable(policy, (*self.path, name), stored)
    if policy is None or (not unbox and isinstance(stored, meta.AxisMetadata)):
        return stored
    if scope.traces_own_code:
        read = functools.partial(own_code.as_read, is_kept=is_kept, dtype=compute_dtype)
        return jax.tree.map(read, stored)
    if compute_dtype is None or not calls.paths:
        return stored
    return cast_floating(stored, compute_dtype)
