"""Outermost calls of nnx modules: a user's own code is traced as a pure function and evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls import own_code
from mpmodules.calls.layer_classes import crossing_of, layer_class
from mpmodules.calls.under_way import nnx_calls as calls
from mpmodules.nnx._own_parameters import own_params
from mpmodules.nnx._resolution import warn_of_scope
from mpmodules.tracing.nnx_lowering import hashable
from mpmodules.tracing.nnx_pure_calls import StatefulCall
from policy.core.policy import Policy
from policy.core.scope import current_scope
from policy.programs import marks


def call_traced(
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
    carry = crossing_of(type(module), name).carry_of(module, args, kwargs)
    return own_code.outputs_of(current_scope(), policy, outputs, *carry)


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
