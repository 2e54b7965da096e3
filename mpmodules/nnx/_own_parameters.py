"""Parameters that a user's nnx module holds, and the calls that read them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

import jax
from flax import nnx as flax_nnx

from mpmodules._own_code import told_apart
from mpmodules._references import is_reference
from mpmodules.nnx._obeying import is_ours
from mpmodules.nnx._pure_calls import StatefulCall
from policy.casting import cast_floating, is_floating
from policy.islands import as_in_force
from policy.own_parameters import CANNOT_BE_TRACED, needs_float32_sums, read_parameter, run
from policy.policy import Policy
from policy.precedence import warn_once
from policy.pure_calls import PureCall
from policy.scope import Scope, current_scope, enter

# ---------------------------------------------------------------------------------------------------------------------
# Whose parameters they are
# ---------------------------------------------------------------------------------------------------------------------


@functools.cache
def is_users(cls: type) -> bool:
    """Returns whether a class of ours is one that a user wrote, and derives from none of Flax's layers."""
    is_plain = is_ours(cls) and getattr(cls, "_upstream_class", None) is flax_nnx.Module
    return is_plain and not cls.__module__.startswith("mpmodules.")


def own_params(module: Any) -> Iterator[tuple[str, flax_nnx.Param]]:
    """Yields the parameters that a module holds itself, in lists, tuples and dicts too, by attribute."""
    for name, attribute in vars(module).items():
        if not name.startswith(("_pytree__", "_object__")):
            yield from ((name, param) for param in _params_in(attribute))


def _params_in(value: Any) -> Iterator[flax_nnx.Param]:
    """Yields the parameters that an attribute of a module is, or holds in containers, but none of other modules."""
    if isinstance(value, flax_nnx.Param):
        yield value
    elif isinstance(value, list | tuple | dict):
        for leaf in jax.tree.leaves(value, is_leaf=is_reference):
            if isinstance(leaf, flax_nnx.Param) or _is_container(leaf):
                yield from _params_in(leaf)
    elif _is_container(value):
        for held in vars(value).values():
            yield from _params_in(held)


def _is_container(value: Any) -> bool:
    is_pytree = isinstance(value, flax_nnx.Pytree) and not isinstance(value, flax_nnx.Module)
    return is_pytree or isinstance(value, flax_nnx.List | flax_nnx.Dict)


def touched_params(module: Any) -> Iterator[flax_nnx.Param]:
    """Yields the parameters of a user's module that follow its policy: those whose names it does not keep."""
    return (param for name, param in own_params(module) if name not in type(module).keep_params)


def store_in_param_dtype(module: Any, policy: Policy | None, arguments: Any) -> None:
    """Casts the parameters that a user's module has just made to param_dtype.

    Args:
      module: the module, just built.
      policy: its policy.
      arguments: what it was built with: parameters among them are shared, and not its own to change.
    """
    if not is_users(type(module)):
        return
    unknown = sorted(set(type(module).keep_params) - {name for name, _ in own_params(module)})
    if unknown:
        names = ", ".join(sorted({name for name, _ in own_params(module)})) or "none"
        warn_once(
            f"{type(module).__name__}.keep_params names {', '.join(unknown)}, but the module has no such parameter. "
            f"It has: {names}."
        )
    if policy is None:
        return
    shared = {id(leaf) for leaf in _variables(arguments)}
    for param in touched_params(module):
        if id(param) not in shared:
            param.set_raw_value(cast_floating(param.get_raw_value(), policy.param_dtype))


def _variables(tree: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(tree, is_leaf=is_reference):
        if isinstance(leaf, flax_nnx.Variable):
            yield leaf
        elif isinstance(leaf, flax_nnx.Module):
            yield from (node for _, node in flax_nnx.iter_graph(leaf) if isinstance(node, flax_nnx.Variable))


# ---------------------------------------------------------------------------------------------------------------------
# Reads
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reader:
    """The user's module whose method is running.

    It reads parameters in compute_dtype that it got from attributes of a user's modules, its own or others'. A layer
    reads its parameters as they are stored.

    Attributes:
      policy: the module's.
    """

    policy: Policy

    @classmethod
    def of(cls, module: Any, policy: Policy | None) -> Reader | None:
        """Returns the reader for a call of `module` under `policy`; None where everything is read as stored."""
        return None if policy is None or not is_users(type(module)) else cls(policy)

    def value(self, param: flax_nnx.Param, value: Any) -> Any:
        """Returns the value of a parameter for the code that reads it."""
        if id(param) not in reads.users or id(param) in reads.as_stored:
            return value
        asked = param.get_metadata().get("compute_dtype")
        dtype = cast(Policy, as_in_force(self.policy, current_scope())).compute_dtype if asked is None else asked
        return read_parameter(value, dtype)


def install_reads(cls: Any) -> None:
    """Makes a user's class note which parameters are got from attributes of its instances, while one of them reads."""
    if not is_users(cls) or cls.__getattribute__ is not object.__getattribute__:
        return

    def __getattribute__(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if reads.reader is not None and not name.startswith("__") and name not in type(self).keep_params:
            for param in _params_in(value):
                reads.users[id(param)] = param
        return value

    cls.__getattribute__ = __getattribute__


class _Reads(threading.local):
    """The reads in this thread.

    Attributes:
      reader: the innermost, or None.
      users: the parameters, by identity, that were got from attributes of a user's modules in the calls under way.
      as_stored: the identities of parameters that are read as stored: those that a call under way writes back.
      as_it_is: the identities of modules whose calls under way run as they are.
    """

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.users: dict[int, flax_nnx.Param] = {}
        self.as_stored: frozenset[int] = frozenset()
        self.as_it_is: frozenset[int] = frozenset()


reads = _Reads()
_get_value, _getattr = flax_nnx.Param.get_value, flax_nnx.Param.__getattr__


def _value_for_reader(self: Any, **index: Any) -> Any:
    if reads.reader is None:
        return _get_value(self, **index)
    if not current_scope().marks_reads:
        return reads.reader.value(self, _get_value(self, **index))
    value = reads.reader.value(self, _get_value(self))  # read first: the rows of a half table are summed up in float32
    return value[index["index"]] if index and index["index"] is not ... else value


def _attribute_for_reader(self: Any, name: str) -> Any:
    if reads.reader is None or name in object.__getattribute__(self, "_var_metadata"):
        return _getattr(self, name)
    return getattr(reads.reader.value(self, self.get_raw_value()), name)


# Flax has one class of parameters, which its modules, states and filters know; outside of our calls it is as before.
flax_nnx.Param.get_value = _value_for_reader
flax_nnx.Param.__getattr__ = _attribute_for_reader


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------

_written: dict[Hashable, frozenset[Any]] = {}  # the parameters that a method writes back, by their paths


def reads_own_params(module: Any, scope: Scope) -> bool:
    """Returns whether a call may read parameters of its module's own in another dtype than they are stored in."""
    if scope.marks_reads or id(module) in reads.as_it_is or not is_users(type(module)):
        return False
    policy = as_in_force(module.dtype_policy, scope)
    values = [param.get_raw_value() for param in touched_params(module)] if policy is not None else []
    return any(map(is_floating, jax.tree.leaves(values)))


def call_reading(
    module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], plainly: Callable[..., Any]
) -> Any:
    """Calls a method that may read parameters of its module's own; their gradients are summed in float32.

    A parameter that the call writes back, as an average that is kept by hand, is read as stored.

    Args:
      module: the module.
      name: the method's name.
      args, kwargs: its arguments.
      plainly: calls the method as it is, given the arguments.
    """
    call = StatefulCall(module, name, args, kwargs, named=False)
    policy = as_in_force(module.dtype_policy, current_scope())
    differentiates = needs_float32_sums(policy, *call.trees)
    key = type(module), name, told_apart(args, kwargs), tuple(path for path, _ in _params(call.nodes))
    written = _written.get(key)
    try:
        if written is None or differentiates:
            traced, written = _traced(call, written or frozenset())
            _written[key] = written
            if differentiates:
                return call.finish(run(traced))
    except CANNOT_BE_TRACED:
        written = frozenset()
    assert written is not None
    outer = reads.as_stored, reads.as_it_is
    reads.as_stored |= {id(param) for path, param in _params(call.nodes) if path in written}
    reads.as_it_is |= {id(module)}
    try:
        return plainly(args, kwargs)
    finally:
        reads.as_stored, reads.as_it_is = outer


def _traced(call: StatefulCall, written: frozenset[Any]) -> tuple[PureCall, frozenset[Any]]:
    """Returns a call's program, and the paths of the parameters that it writes; those are read as stored in it."""
    while True:
        traced = PureCall.of(call.inside(functools.partial(_marked, call, written)), *call.trees)
        computed = object()
        operands = [computed if operand is None else operand for operand in traced.operands()]
        _, state = traced.returned(operands)
        found = {path for path, new in call.changed(state).items() if isinstance(new, flax_nnx.Param)}
        if found <= written:
            return traced, written
        written |= found


@contextlib.contextmanager
def _marked(call: StatefulCall, written: frozenset[Any]) -> Iterator[None]:
    """Marks the reads in a block, but those of parameters that are written, which are read as stored."""
    outer = reads.as_stored
    reads.as_stored = frozenset(id(param) for path, param in _params(call.copies) if path in written)
    try:
        with enter(dataclasses.replace(current_scope(), marks_reads=True)):
            yield
    finally:
        reads.as_stored = outer


def _params(nodes: Any) -> list[tuple[Any, flax_nnx.Param]]:
    """Returns the parameters of nodes and the path of each, the first where it has several."""
    return [(path, node) for path, node in flax_nnx.iter_graph(nodes) if isinstance(node, flax_nnx.Param)]
