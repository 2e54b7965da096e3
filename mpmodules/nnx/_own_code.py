"""A user's own code in nnx modules: its outermost calls are traced as pure functions, and its
parameters stored and read as the policy says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.arguments import is_written_by_user, warn_of_unknown_names
from mpmodules.calls.boundary import MethodCall, is_reference
from mpmodules.calls.boundary import nnx_calls as calls
from mpmodules.calls.classes import layer_class
from mpmodules.nnx._resolution import warn_of_scope
from mpmodules.tracing.nnx_pure_calls import GraphKey, StatefulCall
from policy.core.arrays import cast_floating
from policy.core.policy import Policy
from policy.core.scope import current_scope


def call_traced(
    call: MethodCall,
    policy: Policy,
    *,
    run: Callable[[MethodCall], Any],
    plainly: Callable[[], Any],
) -> Any:
    """Calls an outermost method, whose own code obeys `policy`.

    Args:
      call: the call.
      policy: the module's.
      run: runs the call of a copy of the module.
      plainly: runs the call without a trace.
    """
    if not calls.depth:
        warn_of_scope(call.module, current_scope())
    cls, bare = type(call.module), call._replace(module=None, args=(), kwargs={})

    def body(copy: Any, *args: Any, **kwargs: Any) -> Any:  # kept with its program: holds no arrays
        return run(bare._replace(module=copy, args=args, kwargs=kwargs))

    stateful = StatefulCall(body, (call.module, *call.args), call.kwargs)
    key = "nnx", GraphKey(stateful.graph), call.name, stateful.structure
    try:
        inside = stateful.inside(around=_reading)
        returned = own_code.run(cls, inside, stateful.trees, policy, key=key)
    except own_code.CANNOT_BE_TRACED as error:
        return own_code.run_kept(cls, error, plainly)
    return own_code.outputs_of(call, current_scope(), policy, stateful.finish(returned))


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
        if layer_class(type(module)) is not None:
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


def own_params(module: Any, kind: type = flax_nnx.Param) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that a module holds itself, in lists, tuples and dicts too, by
    attribute.

    Args:
      module: the module.
      kind: of variables to yield.
    """
    for name, attribute in vars(module).items():
        if not name.startswith(("_pytree__", "_object__")):
            yield from ((name, param) for param in _params_in(attribute, kind))


def _params_in(value: Any, kind: type) -> Iterator[Any]:
    """Yields the variables that an attribute of a module is, or holds in containers, but none of
    other modules.
    """
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple | dict):
        for leaf in jax.tree.leaves(value, is_leaf=is_reference):
            if isinstance(leaf, kind) or _is_container(leaf):
                yield from _params_in(leaf, kind)
    elif _is_container(value):
        for held in vars(value).values():
            yield from _params_in(held, kind)


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
    if not is_written_by_user(type(module), flax_nnx.Module):
        return
    if type(module).keep_params:
        warn_of_unknown_names(type(module), (name for name, _ in own_params(module)), "the module")
    if policy is None:
        return
    given = filter(is_reference, jax.tree.leaves(arguments, is_leaf=is_reference))
    shared = {id(node) for each in given for _, node in flax_nnx.iter_graph(each)}
    for name, param in own_params(module):
        if name not in type(module).keep_params and id(param) not in shared:
            param.set_raw_value(cast_floating(param.get_raw_value(), policy.param_dtype))
