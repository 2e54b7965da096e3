"""Outermost calls of nnx modules: a user's own code is traced as a pure function and evaluated."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.defined_in import is_upstream, package_of
from mpmodules.nnx._calls import calls
from mpmodules.nnx._own_parameters import own_params
from mpmodules.nnx._registry import crossing_of, is_ours, layer_class
from mpmodules.nnx._resolution import warn_of_scope
from mpmodules.tracing.nnx_lowering import hashable
from mpmodules.tracing.nnx_pure_calls import StatefulCall
from policy.core.islands import as_in_force
from policy.core.policy import Policy
from policy.core.scope import current_scope
from policy.programs import marks


def keeps(module: Any) -> bool:
    """Returns whether a module's own code runs in the dtypes that it meets."""
    return getattr(type(module), "own_code", None) == "keep" or is_kept_port(module)


def is_kept_port(module: Any) -> bool:
    """Returns whether a module is part of a port that was asked to keep its own code."""
    return module._ported_code == "keep"


@functools.cache
def is_library(method: Any) -> bool:
    """Returns whether a method is Flax's or ours, also where it is transformed."""
    return is_upstream(inspect.unwrap(method))


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
    is_container = isinstance(module, flax_nnx.Sequential)
    return not is_container and all(map(is_library, _cells_of(module)))


def _cells_of(module: Any) -> Iterator[Callable[..., Any]]:
    """Yields the methods of the cells that a loop calls."""
    if isinstance(module, flax_nnx.Bidirectional):
        yield from _cells_of(module.forward_rnn)
        yield from _cells_of(module.backward_rnn)
    elif isinstance(module, flax_nnx.RNN):
        yield type(module.cell).__call__


def policy_of_outermost(module: Any, is_upstream: bool) -> Policy | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    scope, captured = current_scope(), module.dtype_policy
    if not isinstance(captured, Policy) or not own_code.decides(
        scope, as_in_force(captured, scope), None
    ):
        return None
    if is_layer(module, is_upstream) or keeps(module):
        return None
    return as_in_force(captured, scope)


def call(
    module: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    *,
    body: Callable[..., Any],
    plainly: Callable[[], Any],
) -> Any:
    """Calls an outermost method, whose own code obeys `policy`.

    Args:
      module: the module.
      name: the method's name.
      args, kwargs: its arguments.
      policy: the module's.
      body: the method as a function of a copy of the module, and of the arguments.
      plainly: calls the method without a trace.
    """
    if not calls.depth:
        warn_of_scope(module, current_scope())
    stateful = StatefulCall(body, (module, *args), kwargs)
    try:
        returned = own_code.run(
            type(module),
            stateful.inside(_reading),
            stateful.trees,
            policy,
            key=_key(stateful, name),
        )
    except own_code.CANNOT_BE_TRACED as error:
        return own_code.run_kept(type(module), error, plainly)
    outputs = stateful.finish(returned)
    crossing = crossing_of(module, name)
    return own_code.outputs_of(
        current_scope(),
        policy,
        outputs,
        crossing=crossing,
        has_carry=crossing.returns_carry(module, kwargs),
        args=args,
        kwargs=kwargs,
    )


def _key(stateful: StatefulCall, name: str) -> Hashable:
    return "nnx", _GraphKey(stateful.graph), name, stateful.structure


class _GraphKey:
    """A graphdef as a key: hashed once, and made hashable only where it is not."""

    def __init__(self, graph: Any):
        self._graph = graph

    def __hash__(self) -> int:
        try:
            return hash(self._graph)
        except TypeError:
            self._graph = hashable(self._graph)
            return hash(self._graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GraphKey) and self._graph == other._graph


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
            value = _as_read(variable, stored, name in keep)
            if value is not stored:
                variable.set_raw_value(value)
                read.append((variable, stored, value))
    yield
    for variable, stored, value in read:
        if variable.get_raw_value() is value:
            variable.set_raw_value(stored)


def _as_read(variable: Any, stored: Any, is_kept: bool) -> Any:
    if not hasattr(stored, "dtype"):
        return stored
    dtype = variable.get_metadata().get("compute_dtype")
    if isinstance(variable, flax_nnx.Param) and (is_kept or dtype is not None):
        return marks.read_in(stored, dtype)
    return marks.returned_if_half(stored)
