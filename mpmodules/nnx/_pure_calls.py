"""Calls of nnx methods as calls of pure functions: state goes in and out, and is put in place afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules._references import is_reference
from mpmodules.nnx._tracing import named_modules
from policy.casting import cast_array
from policy.tracing import is_array

Place = tuple[int, tuple[Any, ...]]
Attributes = dict[Place, dict[str, Any]]
_OF_FLAX = ("_pytree__", "_object__")  # how the names of what Flax keeps on a module begin


class StatefulCall:
    """A call of a module as one of a pure function.

    Args:
      module: the module.
      name: of its method.
      args, kwargs: the method's arguments.
      named: whether the paths of the modules are put on JAX's name stack.

    Attributes:
      nodes: the module, and the modules and variables among the arguments.
      trees: the pure function's arguments: parameters, other state and inputs.
      attributes: the static attributes that the call set, by node and module path.
    """

    def __init__(self, module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, named: bool):
        leaves, self._treedef = jax.tree.flatten((module, args, kwargs), is_leaf=is_reference)
        self._is_node = [isinstance(leaf, (flax_nnx.Module, flax_nnx.Pytree, flax_nnx.Variable)) for leaf in leaves]
        self.nodes = tuple(leaf for leaf, is_one in zip(leaves, self._is_node, strict=True) if is_one)
        inputs = [leaf for leaf, is_one in zip(leaves, self._is_node, strict=True) if not is_one]
        self._graph, params, rest = flax_nnx.split(self.nodes, flax_nnx.Param, ...)
        self._name, self._named = name, named
        self.trees = params, rest, inputs
        self.attributes: Attributes = {}
        self.copies: tuple[Any, ...] = ()

    def inside(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[..., Any]:
        """Returns the pure function, whose method runs in a context; `copies` are the nodes that it is called with."""

        def pure(params: Any, rest: Any, inputs: Any) -> Any:
            nodes = flax_nnx.merge(self._graph, params, rest, copy=True)
            self.copies = nodes
            merged, given = iter(nodes), iter(inputs)
            filled = [next(merged) if is_one else next(given) for is_one in self._is_node]
            root, args, kwargs = jax.tree.unflatten(self._treedef, filled)
            with named_modules(nodes) if self._named else contextlib.nullcontext(), context():
                before = _attributes(nodes)
                out = getattr(root, self._name)(*args, **kwargs)
                self.attributes = _set_since(before, _attributes(nodes))
            self.copies = ()  # they may hold tracers
            return out, flax_nnx.state(nodes)

        return pure

    def finish(self, returned: tuple[Any, Any]) -> Any:
        """Puts the state that the pure function returned in place where it changed, and returns the call's result."""
        out, state = returned
        changed = self.changed(state)
        if changed:
            flax_nnx.update(self.nodes, flax_nnx.from_flat_state(list(changed.items())))
        modules = _modules(self.nodes)
        for place, attributes in self.attributes.items():
            for name, value in attributes.items() if place in modules else ():
                setattr(modules[place], name, value)
        return out

    def changed(self, state: Any) -> dict[Any, Any]:
        """Returns the variables of a returned state that are new or hold other arrays than before, by path."""
        before = dict(flax_nnx.to_flat_state(flax_nnx.state(self.nodes)))
        return {
            path: _as_stored(new, before[path]) if path in before else new
            for path, new in flax_nnx.to_flat_state(state)
            if path not in before or not _is_same(new, before[path])
        }


def _modules(nodes: tuple[Any, ...]) -> dict[Place, Any]:
    """Returns the modules of each node, by its index and their paths."""
    found = ((i, node) for i, node in enumerate(nodes) if isinstance(node, flax_nnx.Module))
    return {(i, path): module for i, node in found for path, module in flax_nnx.iter_modules(node)}


def _attributes(nodes: tuple[Any, ...]) -> Attributes:
    """Returns the static attributes of each module: those that hold neither state nor parts."""

    def is_static(name: str, value: Any) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=is_reference)
        return not name.startswith(_OF_FLAX) and not any(is_reference(leaf) or is_array(leaf) for leaf in leaves)

    return {
        place: {name: value for name, value in vars(module).items() if is_static(name, value)}
        for place, module in _modules(nodes).items()
    }


def _set_since(before: Attributes, after: Attributes) -> Attributes:
    nothing = object()
    return {
        place: {name: new for name, new in found.items() if before.get(place, {}).get(name, nothing) is not new}
        for place, found in after.items()
    }


def _is_same(new: Any, old: Any) -> bool:
    """Returns whether a variable holds the very arrays that it held before."""
    (leaves, treedef), (before, structure) = jax.tree.flatten(new), jax.tree.flatten(old)
    return treedef == structure and all(a is b for a, b in zip(leaves, before, strict=True))


def _as_stored(new: Any, old: Any) -> Any:
    """Returns a variable's new value in the floating dtype of the old one: half parameters are traced in float32."""
    if not isinstance(new, flax_nnx.Param):
        return new
    return jax.tree.map(lambda array, before: cast_array(array, before.dtype), new, old)
