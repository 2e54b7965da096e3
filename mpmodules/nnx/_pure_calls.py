"""Calls of nnx methods, and of functions of modules, as calls of pure functions: state goes in and
out, and is put in place afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from flax import nnx as flax_nnx

from mpmodules._references import is_reference
from policy._jaxpr.pure_calls import UnreturnableError, require_returnable
from policy.casting import cast_array, is_floating

_OF_FLAX = ("_pytree__", "_object__")  # how the names of what Flax keeps on a module begin
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class _Known:
    """An object in the results of a call, by its number."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Outside:
    """An object in the results of a call that was there before it."""

    value: Any


@dataclasses.dataclass(frozen=True)
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

    Attributes:
      made: the new ones.
    """

    def __init__(self, copies: Sequence[Any]):
        self.made: list[Any] = []
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
            return _Known(self._numbers[id(leaf)])
        if not is_reference(leaf):
            require_returnable(leaf)
            return leaf
        if isinstance(leaf, flax_nnx.GraphDef):
            raise UnreturnableError(leaf)
        parts = {id(node): node for _, node in flax_nnx.iter_graph(leaf) if _is_object(node)}
        if parts.keys() & (self._numbers.keys() | self._inside.keys()):
            raise UnreturnableError(leaf)
        if not _is_object(leaf):
            return leaf
        if not any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(leaf)):
            return _Outside(leaf)
        self._inside |= parts
        self._numbers[id(leaf)] = len(self._numbers)
        self.made.append(leaf)
        return _Known(self._numbers[id(leaf)])


class StatefulCall:
    """A call of a function of modules as one of a pure function.

    Args:
      function: the function.
      args, kwargs: its arguments.

    Attributes:
      nodes: the modules and variables among the arguments.
      trees: the pure function's arguments: parameters, other state and inputs.
      graph: the structure of the nodes.
      edits: the attributes that the call set or deleted, after the pure function ran.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_reference)
        self._is_node = [_is_object(leaf) for leaf in leaves]
        self.nodes = tuple(
            leaf for leaf, is_one in zip(leaves, self._is_node, strict=True) if is_one
        )
        inputs: Any = [
            leaf for leaf, is_one in zip(leaves, self._is_node, strict=True) if not is_one
        ]
        # Lists and dicts among the other arguments of a module's method are the caller's.
        self._is_plain = sum(self._is_node) == 1 and bool(args) and _is_object(args[0])
        if self._is_plain:
            inputs = args[1:], kwargs
        self.graph, params, rest = flax_nnx.split(self.nodes, flax_nnx.Param, ...)
        self._function = function
        self.trees = params, rest, inputs
        self.edits: list[_Edit] = []

    @property
    def structure(self) -> Hashable:
        """The structure of the arguments, in which the nodes have their places."""
        return self._treedef, tuple(self._is_node)

    def inside(
        self, prepare: Callable[[Any], Callable[[], None]] = lambda nodes: lambda: None
    ) -> Callable[..., Any]:
        """Returns the pure function, which calls the function with copies of the nodes.

        Args:
          prepare: is called with the copies first; what it returns is called after the function.

        Raises (the pure function):
          UnreturnableError: an object that the function returned, or set, can't be told apart from
            the copies that it ran on.
        """

        def pure(params: Any, rest: Any, inputs: Any) -> Any:
            nodes = flax_nnx.merge(self.graph, params, rest, copy=True)
            known = _objects(nodes)
            done = prepare(nodes)
            before = [_attributes(node) for node in known]
            out = self._called(nodes, inputs)
            done()
            results = _Results(known)
            variables = [node for node in known if isinstance(node, flax_nnx.Variable)]
            return results.carried(out), (
                variables,
                self._edited(known, before, results),
                results.made,
            )

        return pure

    def _called(self, nodes: tuple[Any, ...], inputs: Any) -> Any:
        """Calls the function with copies."""
        if self._is_plain:
            args, kwargs = inputs
            return self._function(nodes[0], *args, **kwargs)
        merged, given = iter(nodes), iter(inputs)
        filled = [next(merged) if is_one else next(given) for is_one in self._is_node]
        args, kwargs = jax.tree.unflatten(self._treedef, filled)
        return self._function(*args, **kwargs)

    def _edited(
        self, known: Sequence[Any], before: Sequence[Mapping[str, Any]], results: _Results
    ) -> list[Any]:
        """Notes the attributes that the call set or deleted.

        Returns the values of those that hold arrays.
        """
        edits = [edit for i, node in enumerate(known) for edit in _edits(i, node, before[i])]
        values = [results.carried(edit.value) for edit in edits if edit.is_dynamic]
        self.edits = [
            dataclasses.replace(edit, value=None) if edit.is_dynamic else edit for edit in edits
        ]
        return values

    def finish(self, returned: tuple[Any, Any], edits: Sequence[Any] | None = None) -> Any:
        """Puts the state that the pure function returned in place where it changed, and returns the
        call's result.

        Args:
          returned: the results of the pure function.
          edits: those of the call that was traced; None takes the ones of this call.
        """
        out, (variables, values, made) = returned
        known = _objects(self.nodes)
        before = [node for node in known if isinstance(node, flax_nnx.Variable)]
        for old, new in zip(before, variables, strict=True):
            if not _is_same(new, old):
                old.update_from_state(_as_stored(new, old))
        known += made
        results = iter(values)
        for edit in self.edits if edits is None else edits:
            _put_in_place(
                known[edit.index],
                edit,
                _given_back(next(results), known) if edit.is_dynamic else edit.value,
            )
        return _given_back(out, known)


def _is_object(leaf: Any) -> bool:
    return isinstance(leaf, (flax_nnx.Module, flax_nnx.Pytree, flax_nnx.Variable))


def _objects(nodes: tuple[Any, ...]) -> list[Any]:
    """Returns the modules, containers and variables of nodes: in the same order for nodes and for
    their copies.
    """
    return [node for _, node in flax_nnx.iter_graph(nodes) if _is_object(node)]


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
        if (
            name in before
            and before[name][0] == treedef
            and all(map(_is_identical, leaves, before[name][1]))
        ):
            continue
        for leaf in leaves:
            if not is_reference(leaf):
                require_returnable(leaf)
        is_dynamic = any(is_reference(leaf) or isinstance(leaf, jax.Array) for leaf in leaves)
        found.append(
            _Edit(index, name, bool(node._pytree__nodes.get(name)), vars(node)[name], is_dynamic)
        )
    return found + [_Edit(index, name) for name in before if name not in after]


def _is_identical(a: Any, b: Any) -> bool:
    return a is b


def _put_in_place(node: Any, edit: _Edit, value: Any) -> None:
    if value is _NOTHING:
        delattr(node, edit.name)
    else:
        setattr(node, edit.name, flax_nnx.data(value) if edit.is_data else value)


def _given_back(tree: Any, known: Sequence[Any]) -> Any:
    """Returns a tree with the objects given in the places of their copies."""

    def given(leaf: Any) -> Any:
        if isinstance(leaf, _Known):
            return known[leaf.index]
        return leaf.value if isinstance(leaf, _Outside) else leaf

    return jax.tree.map(given, tree, is_leaf=is_reference)


def _is_same(new: Any, old: Any) -> bool:
    """Returns whether a variable holds the very arrays that it held before."""
    (leaves, treedef), (before, structure) = jax.tree.flatten(new), jax.tree.flatten(old)
    return treedef == structure and all(map(_is_identical, leaves, before))


def _as_stored(new: Any, old: Any) -> Any:
    """Returns a variable's new value in the floating dtype of the old one, where that is half or a
    parameter's: it is float32 to the code that writes it.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new
    is_param = isinstance(new, flax_nnx.Param)
    return jax.tree.map(
        lambda array, before: (
            cast_array(array, before.dtype)
            if is_floating(before) and (is_param or before.dtype.itemsize == 2)
            else array
        ),
        new,
        old,
    )
