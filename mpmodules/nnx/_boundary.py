"""The boundary around the methods of nnx modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules import _carries as carries
from mpmodules._constructors import set_by_hand
from mpmodules._defined_in import package_of
from mpmodules._own_code import run_inside, run_layer
from mpmodules.nnx._captured import warn_of_scope
from mpmodules.nnx._obeying import PORT, as_ours, is_ours, viewed
from mpmodules.nnx._own_code import call_port, own_code_of
from mpmodules.nnx._own_parameters import call_reading, policy_of_reader, reads, reads_own_params
from mpmodules.nnx._tracing import note_island
from policy import boundary
from policy.islands import as_in_force
from policy.policy import Policy
from policy.precedence import Effective
from policy.scope import current_scope, enter

# Public methods of a module that are never a boundary: their dtypes are the carry's and the cache's own.
NOT_BOUNDARIES = frozenset({"initialize_carry", "init_cache", "set_view", "train", "eval"})
_FLAX_METHODS = frozenset(dir(flax_nnx.Module)) - {"__call__"}


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A public method of a module.

    Attributes:
      body: the method without a boundary; Flax's own and ours are called with a module of our class.
      name: the name that it has in its class.
      is_upstream: whether it is Flax's own, or ours in its place.
      signature_of: the function whose signature names the arguments, `self` first.
    """

    body: Callable[..., Any]
    name: str
    is_upstream: bool
    signature_of: Any


class _Calls(threading.local):
    """The module calls under way in this thread.

    Attributes:
      depth: how many there are.
      ports: how many of them are outermost calls of ports.
      module: the innermost module.
      crossed: the boundaries below the outermost call, by class.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.ports = 0
        self.module: Any = None
        self.crossed: dict[str, Effective] = {}


_calls = _Calls()


def install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, transformed ones (nnx.jit, nnx.remat) included."""
    for name in {name for base in cls.__mro__ if base is not object for name in vars(base)}:
        if not is_boundary_name(name):
            continue
        method = inspect.getattr_static(cls, name)
        if not is_method(method) or method.__dict__.get("_policy_boundary") is method:
            continue
        setattr(cls, name, _with_boundary(method, name))


def is_boundary_name(name: str) -> bool:
    """Returns whether a method of that name is public, and no method of every module."""
    return (name == "__call__" or not name.startswith("_")) and name not in _FLAX_METHODS and name not in NOT_BOUNDARIES


def is_method(attribute: Any) -> bool:
    """Returns whether an attribute of a class is a method of instances, transformed ones included."""
    if inspect.isfunction(attribute):
        return True
    if isinstance(attribute, staticmethod | classmethod | property | type | functools.partial):
        return False
    # A transformed method, such as nnx.jit makes: callable, binds like a function, and wraps one.
    return callable(attribute) and hasattr(attribute, "__get__") and hasattr(attribute, "__wrapped__")


def _with_boundary(method: Any, name: str) -> Callable[..., Any]:
    is_function = inspect.isfunction(method)
    is_upstream = is_function and package_of(method) in ("flax", "mpmodules")

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nnx.Module):
            return method(self, *args, **kwargs)
        body = method if is_function else lambda self, *args, **kwargs: method.__get__(self)(*args, **kwargs)
        return run_method(self, Method(body, name, is_upstream, method), args, kwargs)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def run_method(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a method of `module` under the policy that the module carries.

    Every call of a public method of a module that obeys policies comes through here, ours or ported.

    Args:
      module: the module, of its own class.
      method: the method.
      args, kwargs: its arguments.
    """
    scope, note = current_scope(), own_code_of(module)
    if scope.hands_on_float32:
        return _run_for_autocast(module, method, args, kwargs, is_layer=note is None)
    if note is None and reads_own_params(module):
        return call_reading(module, method.name, args, kwargs)
    if note is None or _calls.ports:
        return _run_method(module, method, args, kwargs)

    def plainly() -> Any:
        with _port_under_way(depth=0):
            return _run_method(module, method, args, kwargs)

    return call_port(module, note, method.name, plainly, args, kwargs, functools.partial(_port_under_way, depth=1))


@contextlib.contextmanager
def _port_under_way(*, depth: int) -> Iterator[None]:
    """Makes the calls in a block inner ones of a port, `depth` levels below the one under way."""
    _calls.depth += depth
    _calls.ports += 1
    try:
        yield
    finally:
        _calls.depth -= depth
        _calls.ports -= 1


def _run_for_autocast(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_layer: bool
) -> Any:
    """Calls a module inside of a port whose own code autocast runs."""
    scope, policy = current_scope(), module.dtype_policy
    if not is_layer:
        own = as_ours(module) if method.is_upstream else module
        source = module._policy_source.for_those_inside(type(module).__name__)
        return run_inside(lambda: method.body(own, *args, **kwargs), scope, policy, source)

    def call() -> Any:
        cast = (args, kwargs) if policy is None else _cast_inputs(module, policy, method, args, kwargs)
        return _run_method(module, method, *cast)

    return run_layer(call, scope, carries.given_carry(args, kwargs) if _has_carry(module, method, kwargs) else None)


def _cast_inputs(
    module: Any, policy: Policy, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return carries.cast_inputs(
        policy,
        args,
        kwargs,
        is_step=_is_step(module, method.name),
        is_loop=_is_loop(module, method.name),
        keep=getattr(type(module), "keep_inputs", ()),
        signature=lambda: _without_self(method.signature_of),
    )


def _run_method(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scope = current_scope()
    captured, cls = module.dtype_policy, type(module)
    if isinstance(captured, str):
        raise set_by_hand(module, captured)
    policy: Any = as_in_force(captured, scope)
    if scope.in_full_precision:
        note_island(module, policy)
    kind: Any = cls if is_ours(cls) else vars(module)[PORT].kind
    if _calls.depth == 0:
        warn_of_scope(module, scope)
    if kind._is_layer:
        crosses = boundary.layer_crosses(scope, policy, module._policy_source.own)
    else:
        crosses = boundary.module_crosses(scope, policy)
    if crosses and not (kind._is_layer and kind._takes_inputs_as_they_come):
        args, kwargs = _cast_inputs(module, policy, method, args, kwargs)
    explained = contextlib.nullcontext()
    if crosses and policy is not None:
        if _calls.depth:
            _calls.crossed[cls.__name__] = Effective(policy, policy, module._policy_source)
        else:
            explained = carries.scan_explained(_calls.crossed)
    caller, _calls.module = _calls.module, module
    reader, reads.policy = reads.policy, policy_of_reader(module, policy)
    _calls.depth += 1
    try:
        inner = boundary.inside(scope, policy) if crosses else scope
        with explained, enter(inner, module._policy_source.for_those_inside(cls.__name__) if crosses else None):
            if method.is_upstream and kind._is_layer:
                layer = _in_policy(as_ours(module), policy)
                outputs = layer._call_layer(crosses, method.body, method.name, args, kwargs)
            elif method.is_upstream:
                outputs = method.body(_in_policy(as_ours(module), policy), *args, **kwargs)
            else:
                outputs = method.body(module, *args, **kwargs)
    finally:
        _calls.module = caller
        reads.policy = reader
        _calls.depth -= 1
        if not _calls.depth:
            _calls.crossed.clear()
    if _is_step(module, method.name) and policy is not None:
        outputs = carries.hand_on_outputs(outputs, carries.given_carry(args, kwargs))
    has_carry = _has_carry(module, method, kwargs)
    if crosses and policy is not None:
        outputs = carries.cast_outputs(boundary.returns(scope, policy), outputs, has_carry=has_carry)
    if caller is None or caller is module or scope.policy is None or not _casts_outputs(module):
        return outputs
    handed_on = scope.policy.replace(output_dtype=scope.policy.compute_dtype)
    return carries.cast_outputs(handed_on, outputs, has_carry=has_carry)


def _in_policy(module: Any, policy: Policy | None) -> Any:
    """Returns a view of a module of ours that computes as `policy` says: the one captured, or that of an island."""
    if policy == module.dtype_policy:
        return module
    dtypes = {} if policy is None or getattr(module, "dtype", None) is None else {"dtype": policy.compute_dtype}
    return viewed(module, dtype_policy=policy, **dtypes)


def _casts_outputs(module: Any) -> bool:
    """Returns whether a module was ported with `cast_submodules`."""
    port = vars(module).get(PORT)
    return port is not None and port.casts_outputs


def _is_step(module: Any, name: str) -> bool:
    """Returns whether a call is a step of a recurrent cell, from carry and input to carry and output."""
    return name == "__call__" and isinstance(module, flax_nnx.RNNCellBase)


def _is_loop(module: Any, name: str) -> bool:
    """Returns whether a call runs a recurrent cell over a sequence, and may take and return a carry."""
    return name == "__call__" and isinstance(module, flax_nnx.RNN | flax_nnx.Bidirectional)


def _has_carry(module: Any, method: Method, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call returns a carry, as the first of a pair."""
    returns_one = _is_loop(module, method.name) and carries.returns_carry(module, kwargs)
    return _is_step(module, method.name) or returns_one


def _without_self(method: Any) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
