"""A call of an nnx module: who is outermost, what is cast, the boundary around each method, and a
user's own code, which is traced as a pure function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules.calls import boundary, classes, own_code
from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_reference
from mpmodules.calls.under_way import nnx_calls as calls
from mpmodules.nnx._resolution import (
    effective_policy,
    in_policy,
    warn_of_scope,
    warn_of_strangers,
)
from mpmodules.tracing.names import PATH, name_scope, note_island
from mpmodules.tracing.nnx_pure_calls import StatefulCall, graph_key
from policy.core.arrays import cast_floating
from policy.core.policy import Policy
from policy.core.precedence import Effective, warn_of_autocast
from policy.core.scope import Scope, current_scope
from policy.programs import marks
from policy.programs.thread import thread
from policy.quantized.params import require_trainable

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
_NOT_BOUNDARIES = (
    frozenset({"initialize_carry", "init_cache", "set_view", "train", "eval"})
    | frozenset(dir(flax_nnx.Module))
) - {"__call__"}


# --------------------------------------------------------------------------------------------------
# Methods under the policy of their module
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _under_way(call: MethodCall, effective: Effective, scope: Scope) -> Iterator[None]:
    """Counts the call of a module for a block."""
    module = call.module
    if scope.in_full_precision and not scope.traces_own_code and PATH in vars(module):
        note_island(module, effective.policy)
    if not calls.depth and scope.policy is not None and scope.policy != module.dtype_policy:
        warn_of_scope(module, scope)
    inside, calls.inside = calls.inside, 0
    calls.depth += 1
    try:
        with marks.numbered_call(inside) if scope.traces_own_code else _NOTHING:
            yield
    finally:
        calls.inside = inside + 1
        calls.depth -= 1


def _run_layer(call: MethodCall) -> Any:
    if not call.is_upstream:
        return call.run(call.module)
    view = in_policy(call.module, call.effective.policy)
    return view._call_layer(call) if view._is_layer else call.run(view)


NNX = boundary.Api(
    captures=True,
    effective=effective_policy,
    where=lambda module: type(module).__name__,
    calls=calls,
    under_way=_under_way,
    run_layer=_run_layer,
    run_own_code=lambda call, _: call.run(call.module),
    run_in_trace=own_code.run_in_trace,
)
_NOTHING = contextlib.nullcontext()


def run_method(call: MethodCall) -> Any:
    """Calls a method under the policy that its module carries.

    Every call of a public method of a module that obeys policies comes through here, ours or
    ported.
    """
    module = call.module
    if thread.autocast is not None and not calls.depth:
        warn_of_autocast(module, module.dtype_policy)
    is_named = PATH in vars(module) and call.name == "__call__"
    with name_scope(module) if is_named else _NOTHING:
        scope = current_scope()
        effective = boundary.outermost(NNX, call, scope)
        if effective is not None and effective.policy is not None:
            return _call_traced(call, effective.policy, scope)
        if module._ported_code == "keep" and not scope.traces_own_code:
            with own_code.keeping():
                return _run_here(call)
        return boundary.run_method(NNX, call, scope)


def _run_here(call: MethodCall) -> Any:
    return boundary.run_method(NNX, call, current_scope())


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
        if not classes.is_public(name) or name in _NOT_BOUNDARIES or not _computes(owner, name):
            continue
        method = inspect.getattr_static(cls, name)
        if not _is_method(method) or method.__dict__.get("_policy_boundary") is method:
            continue
        bounded = _with_boundary(method, name)
        setattr(cls, name, classes.InstanceMethod(method, bounded) if is_port else bounded)


def _computes(owner: type, name: str) -> bool:
    """Returns whether a public method may compute: those of Python's own classes, such as Mapping,
    do not, and of Flax's classes that are no layers only ``__call__`` does.
    """
    if classes.is_flax(owner):
        return owner in classes.LAYER_OF or name == "__call__"
    is_module = issubclass(owner, flax_nnx.Module)
    return is_module or classes.package_of(owner) not in sys.stdlib_module_names


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
    is_upstreams = is_function and classes.is_upstream(method)

    @functools.wraps(method)
    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(self)(*args, **kwargs)

    bound.__name__ = name
    body = method if is_function and method.__name__ == name else bound

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nnx.Module):
            return method(self, *args, **kwargs)
        return run_method(MethodCall(self, body, args, kwargs, is_upstreams))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


# --------------------------------------------------------------------------------------------------
# A user's own code, traced as a pure function
# --------------------------------------------------------------------------------------------------


def _call_traced(call: MethodCall, policy: Policy, scope: Scope) -> Any:
    """Calls an outermost method, whose own code obeys `policy`, the module's."""
    if not calls.depth:
        warn_of_scope(call.module, scope)
    cls, bare = type(call.module), call._replace(module=None, args=(), kwargs={})

    def body(copy: Any, *args: Any, **kwargs: Any) -> Any:  # kept with its program: holds no arrays
        warn_of_strangers(copy, copy, scope)
        return run_method(bare._replace(module=copy, args=args, kwargs=kwargs))

    stateful = StatefulCall(body, (call.module, *call.args), call.kwargs)
    key = "nnx", graph_key(stateful.graph), call.method, stateful.structure
    try:
        inside = stateful.inside(around=_reading)
        returned = own_code.run(cls, inside, stateful.trees, policy, key=key)
    except own_code.CANNOT_BE_TRACED as error:
        return own_code.run_kept(cls, error, lambda: _run_here(call))
    return own_code.outputs_of(call, scope, policy, stateful.finish(returned))


@contextlib.contextmanager
def _reading(nodes: Any) -> Iterator[None]:
    """Makes the variables of users' modules read as their code is to read them.

    Half-precision ones are float32, and parameters that no policy casts stay float32. Afterwards
    those that the code did not write hold what they held.

    Args:
      nodes: copies of the modules, whose methods are about to be traced.
    """
    read: list[tuple[Any, Any, Any]] = []
    for _, module in flax_nnx.iter_modules(nodes):
        if classes.layer_class(type(module)) is not None:
            continue
        keep = getattr(type(module), "keep_params", ())
        for name, variable in own_params(module, flax_nnx.Variable):
            stored = variable.get_raw_value()
            asked = variable.get_metadata().get("compute_dtype")
            is_param = isinstance(variable, flax_nnx.Param)
            dtype, is_kept = (asked, name in keep) if is_param else (None, False)
            value = own_code.as_read(stored, is_kept=is_kept, dtype=dtype)
            if value is not stored:
                variable.set_raw_value(value)
                read.append((variable, stored, value))
    yield
    for variable, stored, value in read:
        if variable.get_raw_value() is value:
            variable.set_raw_value(stored)


# --------------------------------------------------------------------------------------------------
# Parameters that a user's module holds itself
# --------------------------------------------------------------------------------------------------


def children_of(node: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the modules and variables that a node holds, in lists, tuples and dicts too, and the
    keys to each.
    """
    held = vars(node)
    if getattr(node, "_pytree__is_pytree", False):
        held = {name: value for name, value in held.items() if node._pytree__nodes.get(name)}
    leaves = jax.tree_util.tree_leaves_with_path(held, is_leaf=is_child)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in leaves
        if is_child(leaf)
    ]


def is_child(x: Any) -> bool:
    return isinstance(x, flax_nnx.Pytree | flax_nnx.Variable)


def own_params(module: Any, kind: type = flax_nnx.Param) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that a module holds itself, in containers too, by attribute; none of
    other modules.

    Args:
      module: the module, or a container.
      kind: of variables to yield.
    """
    for (name, *_), child in children_of(module):
        if isinstance(child, kind):
            yield name, child
        elif _is_container(child):
            yield from ((name, param) for _, param in own_params(child, kind))


def _is_container(value: Any) -> bool:
    is_pytree = isinstance(value, flax_nnx.Pytree) and not isinstance(value, flax_nnx.Module)
    return is_pytree or isinstance(value, flax_nnx.List | flax_nnx.Dict)


def store_in_param_dtype(module: Any, policy: Policy | None, arguments: Any) -> None:
    """Casts the parameters that a user's module has just made to param_dtype.

    Args:
      module: the module, just built.
      policy: its policy.
      arguments: those that it was built with; parameters among them are shared, and stay as they
        are.
    """
    if not classes.is_written_by_user(type(module), flax_nnx.Module):
        return
    if type(module).keep_params:
        left_out = (name for name, value in vars(module).items() if value is None)
        names = (*(name for name, _ in own_params(module)), *left_out)
        classes.warn_of_unknown_names(type(module), names)
    if policy is None:
        return
    given = filter(is_reference, jax.tree.leaves(arguments, is_leaf=is_reference))
    shared = {id(node) for each in given for _, node in flax_nnx.iter_graph(each)}
    for name, param in own_params(module):
        if name not in type(module).keep_params and id(param) not in shared:
            require_trainable(policy, (type(module).__name__, name), param.get_raw_value())
            param.set_raw_value(cast_floating(param.get_raw_value(), policy.param_dtype))
