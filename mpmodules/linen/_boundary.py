"""The boundary around the methods of linen modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_nn

from mpmodules.calls import own_code
from mpmodules.calls.boundary import Arguments, cast_outputs, signature_without_self
from mpmodules.calls.defined_in import is_upstream
from mpmodules.calls.own_code import run_inside, run_layer
from mpmodules.calls.scan_errors import scan_explained
from mpmodules.linen._calls import call_under_way, calls
from mpmodules.linen._foreign import in_compute_dtype
from mpmodules.linen._half_states import put_back_for_layer, states_made_in_float32
from mpmodules.linen._own_code import NOT_BOUNDARIES, call, is_layer, policy_of_outermost
from mpmodules.linen._registry import crossing_of
from mpmodules.linen._resolution import effective_policy, fields_set, plain_fields, where
from policy.core import boundary
from policy.core.matmul_precision import multiplying
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import Scope, current_scope, enter

_FLAX_METHODS = frozenset(dir(flax_nn.Module)) - {"__call__"}


def install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, and around its setup.

    Interceptors and summaries of Flax see the uncast inputs and the final outputs: its machinery is
    outside of the boundary. A class made by nn.scan, nn.remat, nn.jit, ... copies the attributes of
    the method that it transforms, our mark included. A mark that points to another function
    therefore identifies such a method, which gets a boundary outside of the transform.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    names = {name for base in cls.__mro__ if base is not object for name in vars(base)}
    for name in names:
        is_setup = name == "setup"
        private = name.startswith("_") and name != "__call__"
        if (
            name in fields
            or private
            or (not is_setup and (name in _FLAX_METHODS or name in NOT_BOUNDARIES))
        ):
            continue
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method) or hasattr(method, "nowrap"):
            continue
        if method is inspect.getattr_static(flax_nn.Module, name, None):
            # A wrapped copy here would come before the layer's own in the order of inheritance.
            continue
        mark = method.__dict__.get("_policy_boundary")
        if mark is method:
            continue
        setattr(
            cls,
            name,
            _setup_with_policy(method) if is_setup else _bounded(method, lifted=mark is not None),
        )


def _bounded(method: Callable[..., Any], *, lifted: bool) -> Callable[..., Any]:
    """Puts a boundary around a method: inside of Flax's wrapper, unless it is a transformed one."""
    wrapped = getattr(method, "__wrapped__", None)
    transformed = lifted or hasattr(wrapped, "method_handler_wrapped")
    if wrapped is None or transformed or not hasattr(method, "method_handler_wrapped"):
        return _with_boundary(method, lifted=lifted)
    bounded = flax_nn.module.wrap_method_once(_with_boundary(wrapped, lifted=False))
    bounded._policy_boundary = bounded  # type: ignore[attr-defined]
    return bounded


def _with_boundary(method: Callable[..., Any], *, lifted: bool) -> Callable[..., Any]:
    own_body = not lifted and is_upstream(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nn.Module) or self.scope is None:
            return method(
                self, *args, **kwargs
            )  # Flax says what is wrong with a call on an unbound module
        return run_method(self, method, args, kwargs, lifted=lifted, own_body=own_body)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def _setup_with_policy(setup: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `setup` under the module's policy, whichever entry reaches it: params made there need
    their dtype.
    """

    @functools.wraps(setup)
    def call(self: Any) -> Any:
        return run_setup(self, lambda: setup(self))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def run_setup(module: Any, setup: Callable[[], Any]) -> Any:
    """Runs a module's setup under its policy, and a layer's with its fields as the policy wants
    them.
    """
    scope = current_scope()
    effective = effective_policy(module, scope)
    if not getattr(type(module), "_is_layer", False):
        inner = _scope_inside(scope, effective, boundary.module_crosses(scope, effective.base))
        traces = scope.traces_own_code and not _keeps(module)
        states = states_made_in_float32(module) if traces else contextlib.nullcontext()
        with enter(inner, effective.source.for_those_inside(where(module))), states:
            return setup()
    with fields_set(module, module._policy_fields(effective.policy, None, "setup")):
        return setup()


def _scope_inside(scope: Scope, effective: Effective, crosses: bool) -> Scope:
    """Returns the scope inside of a module's call."""
    if effective.policy is None:
        return scope
    return (
        boundary.inside(scope, effective.policy)
        if crosses
        else dataclasses.replace(scope, policy=effective.policy)
    )


def run_method(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    lifted: bool = False,
    own_body: bool = True,
    cast_result: bool = False,
) -> Any:
    """Calls ``method(module, *args, **kwargs)`` under the policy that `module` obeys.

    Args:
      lifted: `method` is a transformed one, which calls another boundary of the same module inside
        of the transform: only the casts and the scope are applied here.
      own_body: `method` is the layer's own. Around a user's method on top of a layer only the
        fields are set: its inputs are the user's business, and the layer's own method is a call
        inside.
      cast_result: whether outputs are cast to the compute_dtype in force where the method is
        called.
    """
    scope, given = current_scope(), args
    if lifted and (policy := policy_of_outermost(module, method)) is not None:
        plainly = functools.partial(method, module)
        return call(module, method, args, kwargs, policy, plainly=plainly)
    effective = effective_policy(module, scope)  # before the call is noted: who is calling decides
    calls.note_obeyed(module, effective)
    with call_under_way(module, scope):
        if scope.traces_own_code:
            if not _keeps(module) and not is_layer(module, method):
                return _run_inside(module, method, args, kwargs, effective, lifted=lifted)
            return _run_layer(module, method, args, kwargs, lifted=lifted, own_body=own_body)
        is_bare = getattr(type(module), "_is_layer", False)
        if is_bare:
            crosses = boundary.layer_crosses(scope, effective.policy, effective.own)
        else:
            crosses = boundary.module_crosses(scope, effective.base)
        crossing = crossing_of(module, _name_of(method))
        if (
            effective.policy is not None
            and crosses
            and not (is_bare and type(module)._takes_inputs_as_they_come)
        ):
            args, kwargs = _cast_inputs(module, effective.policy, method, args, kwargs)
        inner = _scope_inside(scope, effective, crosses)
        source = effective.source.for_those_inside(where(module))
        explained = _scan_carries_explained(module, crosses, effective)
        with enter(inner, source), explained, multiplying(effective.policy, scope.policy):
            if not getattr(type(module), "_dtype_fields", False) or lifted:
                outputs = method(module, *args, **kwargs)
            elif own_body:
                outputs = module._call_layer(effective, crosses and is_bare, method, args, kwargs)
            else:
                with fields_set(module, plain_fields(module, effective)):
                    outputs = method(module, *args, **kwargs)
        if effective.policy is not None:
            outputs = crossing.keep_carry(outputs, args, kwargs)
        if not (crosses or cast_result):
            return outputs
        has_carry = crossing.returns_carry(module, kwargs)
        if crosses and effective.policy is not None:
            returned = boundary.returns(scope, effective.policy)
            outputs = cast_outputs(returned, outputs, has_carry=has_carry)
        if cast_result and scope.policy is not None:
            outputs = in_compute_dtype(
                scope.policy, outputs, has_carry=has_carry, module=module, args=given
            )
        return outputs


def _keeps(module: Any) -> bool:
    """Returns whether a module's class keeps its own code out of a trace."""
    return getattr(type(module), "own_code", None) == "keep"


def _run_inside(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    effective: Effective,
    *,
    lifted: bool,
) -> Any:
    """Calls a module's own code in a trace of the code around it."""
    source = effective.source.for_those_inside(where(module))

    def run() -> Any:
        with states_made_in_float32(module):
            if not getattr(type(module), "_dtype_fields", False) or lifted:
                return method(module, *args, **kwargs)
            with fields_set(module, plain_fields(module, effective)):
                return method(module, *args, **kwargs)

    return run_inside(run, current_scope(), effective.base, source)


def _run_layer(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    lifted: bool,
    own_body: bool,
) -> Any:
    """Calls a layer in a trace of the code around it."""
    scope, crossing = current_scope(), crossing_of(module, _name_of(method))
    put_back_for_layer(module)

    def run() -> Any:
        policy, cast = effective_policy(module, current_scope()).policy, (args, kwargs)
        if policy is not None and not own_code.come_wide(module, args):
            cast = _cast_inputs(module, policy, method, args, kwargs)
        keep = own_code.keeping() if _keeps(module) else contextlib.nullcontext()
        with keep:
            outputs = run_method(module, method, *cast, lifted=lifted, own_body=own_body)
        if calls.recorded is not None:
            calls.recorded.note_run(module, *cast, outputs)
        return outputs

    has_carry = crossing.returns_carry(module, kwargs)
    return run_layer(run, scope, crossing.given_carry(args, kwargs) if has_carry else None)


def _cast_inputs(
    module: Any,
    policy: Policy,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments:
    return crossing_of(module, _name_of(method)).cast_inputs(
        policy,
        args,
        kwargs,
        keep=getattr(type(module), "keep_inputs", ()),
        signature=lambda: signature_without_self(method),
    )


@contextlib.contextmanager
def _scan_carries_explained(module: Any, crosses: bool, effective: Effective) -> Iterator[None]:
    """Notes a boundary, and adds those inside of it to JAX's error for a scan whose carry changes
    its dtype.
    """
    path = "/".join(module.path)
    if crosses and effective.policy is not None:
        calls.crossed[path] = effective
    lifting = "lift its class (nn.scan(Block)) instead of a function, "
    with scan_explained(calls.crossed, path, lifting=lifting):
        yield


def _name_of(method: Callable[..., Any]) -> str:
    """Returns the name of a method; "" of a `functools.partial`, which has none."""
    return getattr(method, "__name__", "")
