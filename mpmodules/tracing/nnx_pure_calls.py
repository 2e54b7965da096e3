"""Calls of nnx methods, and of functions of modules, as calls of pure functions: state goes in and
out, and is put in place afterwards.

The result's structure tells what such a call did to the objects, apart from arrays, so that a
program that was traced once tells it at every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
from flax import nnx as flax_nnx

from mpmodules.calls.classes import is_reference
from mpmodules.calls.own_code import key_of
from mpmodules.tracing.names import named
from policy.core.arrays import cast_array, is_floating
from policy.programs.tracing.pure_calls import UnreturnableError, require_returnable
from policy.programs.tracing.trace import Lowered

_OF_FLAX = ("_pytree__", "_object__")  # how the names of what Flax keeps on a module begin
_NOTHING = object()
_OBJECTS = {flax_nnx.Pytree, flax_nnx.Variable}  # modules and containers among the first


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Object:
    """An object in the results of a call: its number, or itself where it was there before the call
    and is none of its copies.
    """

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Edit:
    """An attribute that a call set or deleted.

    Attributes:
      index: of the object that has it.
      name: the attribute's.
      is_data: whether Flax has it for data.
      value: the new value; `_NOTHING` where it was deleted.
      is_dynamic: whether the value holds arrays or objects, and is a result of the pure function.
    """

    index: int
    name: str
    is_data: bool = False
    value: Any = _NOTHING
    is_dynamic: bool = False


class _Results:
    """The results of a call of copies, in which objects are told by their numbers: first the
    copies, then new ones.

    Args:
      copies: the copies.
      has_states: whether a state, or a graphdef, is a result as it is: a tree of arrays.

    Attributes:
      made: the new ones.
    """

    def __init__(self, copies: Sequence[Any], has_states: bool):
        self.made: list[Any] = []
        self._has_states = has_states
        self._numbers = {id(copy): i for i, copy in enumerate(copies)}
        self._inside: dict[int, Any] = {}  # of new ones

    def carried(self, tree: Any) -> Any:
        """Returns a tree with its objects told by their numbers.

        Raises:
          UnreturnableError: a new object holds a copy, or is a part of two.
        """
        return jax.tree.map(self._carried, tree, is_leaf=is_reference)

    def _carried(self, leaf: Any) -> Any:
        if id(leaf) in self._numbers:
            return _Object(self._numbers[id(leaf)])
        if not is_reference(leaf):
            require_returnable(leaf)
            return leaf
        if self._has_states and isinstance(leaf, flax_nnx.State | flax_nnx.GraphDef):
            return leaf
        if isinstance(leaf, flax_nnx.GraphDef):
            raise UnreturnableError(leaf)
        parts = {id(node): node for _, node in flax_nnx.iter_graph(leaf) if _is_object(node)}
        if parts.keys() & (self._numbers.keys() | self._inside.keys()):
            raise UnreturnableError(leaf)
        if not _is_object(leaf):
            return leaf
        if not any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(leaf)):
            return _Object(leaf)
        self._inside |= parts
        self._numbers[id(leaf)] = len(self._numbers)
        self.made.append(leaf)
        return _Object(self._numbers[id(leaf)])


@dataclasses.dataclass(frozen=True)
class _Pure:
    """A function of modules as one of their parameters, other state, and other arguments.

    It calls the function with copies. It returns the result, and the state after the call.

    Attributes:
      function: the function.
      graph: the structure of the nodes among its arguments.
      treedef: the structure of its arguments.
      is_node: for each of their leaves, whether it is a node.
      is_plain: whether the first argument alone is a node, and the others are as they were given.
      around: makes a context of the copies, for the call.
      prepared: returns the copies as they are to be called, with the same variables.
      has_states: whether states among the results are trees of arrays.
    """

    function: Callable[..., Any]
    graph: Any
    treedef: Any
    is_node: tuple[bool, ...]
    is_plain: bool
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
    prepared: Callable[[Any], Any] = lambda nodes: nodes
    has_states: bool = False

    def __call__(self, params: Any, rest: Any, inputs: Any) -> Any:
        nodes = self.prepared(flax_nnx.merge(self.graph, params, rest, copy=True))
        known, variables = _objects(nodes), _variables(nodes)
        with self.around(nodes):
            before = [_attributes(node) for node in known]
            out = self._called(nodes, inputs)
        results = _Results(known, self.has_states)
        returned = results.carried(out)
        edits = [edit for i, node in enumerate(known) for edit in _edits(i, node, before[i])]
        values = [results.carried(edit.value) for edit in edits if edit.is_dynamic]
        told = [dataclasses.replace(e, value=None) if e.is_dynamic else e for e in edits]
        return returned, flax_nnx.from_flat_state(variables), (told, values, results.made)

    def _called(self, nodes: tuple[Any, ...], inputs: Any) -> Any:
        if self.is_plain:
            args, kwargs = inputs
            return self.function(nodes[0], *args, **kwargs)
        merged, given = iter(nodes), iter(inputs)
        filled = [next(merged) if is_one else next(given) for is_one in self.is_node]
        args, kwargs = jax.tree.unflatten(self.treedef, filled)
        return self.function(*args, **kwargs)


class StatefulCall:
    """A call of a function of modules as one of a pure function.

    Args:
      function: the function.
      args, kwargs: its arguments.

    Attributes:
      nodes: the modules and variables among the arguments.
      trees: the pure function's arguments: parameters, other state and inputs.
      graph: the structure of the nodes.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_reference)
        is_node = tuple(map(_is_object, leaves))
        self.nodes = tuple(filter(_is_object, leaves))
        self._others = list(itertools.filterfalse(_is_object, leaves))
        # Lists and dicts among the other arguments of a module's method are the caller's.
        is_plain = sum(is_node) == 1 and bool(args) and _is_object(args[0])
        inputs: Any = (args[1:], kwargs) if is_plain else self._others
        self.graph, params, rest = flax_nnx.split(self.nodes, flax_nnx.Param, ...)
        self.trees = params, rest, inputs
        self._pure = _Pure(function, self.graph, treedef, is_node, is_plain)

    @property
    def structure(self) -> tuple[Any, tuple[bool, ...]]:
        """The structure of the arguments, in which the nodes have their places."""
        return self._pure.treedef, self._pure.is_node

    def inside(self, **options: Any) -> Callable[..., Any]:
        """Returns the pure function, which calls the function with copies of the nodes.

        Args:
          **options: `around`, `prepared` and `has_states` of `_Pure`.

        Raises (the pure function):
          UnreturnableError: an object that the function returned, or set, can't be told apart from
            the copies that it ran on.
        """
        return dataclasses.replace(self._pure, **options)

    def origins(self) -> tuple[int | None, ...]:
        """Returns the position of the argument that each leaf of `trees` came from.

        It is None for keyword arguments.
        """
        treedef, is_node = self.structure
        keys = treedef.unflatten(range(treedef.num_leaves))
        # (args, kwargs): the second key of one of args is its position.
        of_leaf = [
            path[1].idx if path[0].idx == 0 else None
            for path, _ in jax.tree_util.tree_leaves_with_path(keys)
        ]
        of_nodes = list(itertools.compress(of_leaf, is_node))
        of_others = list(itertools.compress(of_leaf, (not one for one in is_node)))
        params, rest, _ = self.trees
        states = [
            of_nodes[path[0].key]
            for state in (params, rest)
            for path, _ in jax.tree_util.tree_leaves_with_path(state)
        ]
        pairs = zip(of_others, self._others, strict=True)
        return (*states, *(i for i, other in pairs for _ in jax.tree.leaves(other)))

    def finish(self, returned: tuple[Any, Any, Any]) -> Any:
        """Puts the state that the pure function returned in place where it changed, and returns the
        call's result.
        """
        out, state, (told, values, made) = returned
        self._update(state)

        @functools.cache  # most calls need none
        def known() -> list[Any]:
            return [*_objects(self.nodes), *made]

        results = iter(values)
        for edit in told:
            value = _given_back(next(results), known) if edit.is_dynamic else edit.value
            node = known()[edit.index]
            if value is _NOTHING:
                delattr(node, edit.name)
            else:
                setattr(node, edit.name, flax_nnx.data(value) if edit.is_data else value)
        return _given_back(out, known)

    def _update(self, state: Any) -> None:
        """Puts new values in the variables of the nodes. Most calls change none."""
        params, rest, _ = self.trees
        given = dict((*flax_nnx.to_flat_state(params), *flax_nnx.to_flat_state(rest)))
        after = flax_nnx.to_flat_state(state)
        changed = {path: new for path, new in after if not _is_same(new, given[path])}
        for path, old in _variables(self.nodes) if changed else ():
            if path in changed:
                old.update_from_state(_as_stored(changed[path], old))


def _is_object(leaf: Any) -> bool:
    # Asked of the MRO, as `is_reference` does: the metaclasses of modules ask all subclasses.
    return not _OBJECTS.isdisjoint(type(leaf).__mro__)


def _objects(nodes: tuple[Any, ...]) -> list[Any]:
    """Returns the modules, containers and variables of nodes: in the same order for nodes and for
    their copies.
    """
    return [node for _, node in flax_nnx.iter_graph(nodes) if _is_object(node)]


def _variables(nodes: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Returns the variables of nodes, each with the path to it, as in the nodes' state."""
    graph = flax_nnx.iter_graph(nodes)
    return [(path, node) for path, node in graph if isinstance(node, flax_nnx.Variable)]


def _attributes(node: Any) -> dict[str, tuple[Any, list[Any]]]:
    """Returns the structure and the leaves of each attribute of a module or container.

    A variable has none.
    """
    found: dict[str, tuple[Any, list[Any]]] = {}
    own: dict[str, Any] = {} if isinstance(node, flax_nnx.Variable) else vars(node)
    for name, value in own.items():
        if not name.startswith(_OF_FLAX):
            leaves, treedef = jax.tree.flatten(value, is_leaf=is_reference)
            found[name] = treedef, leaves
    return found


def _edits(index: int, node: Any, before: Mapping[str, Any]) -> list[_Edit]:
    """Returns the attributes of an object that differ from those before."""
    after, found = _attributes(node), []
    for name, (treedef, leaves) in after.items():
        structure, old = before.get(name, (_NOTHING, []))
        if treedef == structure and all(map(operator.is_, leaves, old)):
            continue
        for leaf in leaves:
            if not is_reference(leaf):
                require_returnable(leaf)
        is_dynamic = any(is_reference(leaf) or isinstance(leaf, jax.Array) for leaf in leaves)
        found.append(
            _Edit(index, name, bool(node._pytree__nodes.get(name)), vars(node)[name], is_dynamic)
        )
    return found + [_Edit(index, name) for name in before if name not in after]


def _given_back(tree: Any, known: Callable[[], list[Any]]) -> Any:
    """Returns a tree with the objects given in the places of their copies."""

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, _Object):
            return leaf
        return known()[leaf.value] if isinstance(leaf.value, int) else leaf.value

    return jax.tree.map(given, tree, is_leaf=lambda x: is_reference(x) or isinstance(x, _Object))


def _is_same(new: Any, old: Any) -> bool:
    """Returns whether a variable holds the very arrays that it held before."""
    if new.get_raw_value() is old.get_raw_value():
        return True
    (leaves, treedef), (before, structure) = jax.tree.flatten(new), jax.tree.flatten(old)
    return treedef == structure and all(map(operator.is_, leaves, before))


def _as_stored(new: Any, old: Any) -> Any:
    """Returns a variable's new value in the floating dtype of the old one, where that is half or a
    parameter's: it is float32 to the code that writes it.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new
    is_param = isinstance(new, flax_nnx.Param)

    def stored(array: Any, before: Any) -> Any:
        is_cast = is_floating(before) and (is_param or before.dtype.itemsize == 2)
        return cast_array(array, before.dtype) if is_cast else array

    return jax.tree.map(stored, new, old)


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """Lowers a call of a module or method, or with modules among its arguments, to a call of a pure
    function.

    Every `nnx.Param` of the modules is a parameter, and the call's updates of their state are put
    in place. A `nnx.State` is a tree of arrays, as for `jax.jit`: changes of modules that are
    merged from it do not change it.
    """
    module, method = _holder(fn)
    owner = () if module is None else (module,)
    call = StatefulCall(method, (*owner, *args), kwargs)
    if not call.nodes:
        return None

    def origins() -> tuple[int | None, ...]:
        found = call.origins()
        return tuple(None if i is None or i < len(owner) else i - len(owner) for i in found)

    return Lowered(
        (graph_key(call.graph), call.structure),
        call.inside(prepared=named, has_states=True),
        call.trees,
        finish=call.finish,
        result=lambda returned: returned[0],
        states=(1,),
        origins=origins,
    )


def graph_key(graph: Any) -> Any:
    """Returns a key of a graphdef; of lists, dicts and sets that are static in it, the contents
    count.

    That of one which holds arrays or modules as static data, which may change, has no hash.
    """
    with contextlib.suppress(TypeError):
        hash(graph)
        return graph
    with contextlib.suppress(TypeError):
        attributes = tuple((name, key_of(value, {})) for name, value in graph.attributes)
        return tuple(graph.nodes), attributes
    return []


def _holder(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the module that a function is, or is a method of, or None.

    And the function of module and arguments, or the function itself.
    """
    if isinstance(fn, flax_nnx.Module):
        return fn, operator.call
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, flax_nnx.Module):
        return owner, lambda module, *args, **kwargs: getattr(module, fn.__name__)(*args, **kwargs)
    return None, fn


def is_no_parameter(node: Any) -> bool:
    """Returns whether an object is a variable of nnx that no gradient is taken by."""
    return isinstance(node, flax_nnx.Variable) and not isinstance(node, flax_nnx.Param)
