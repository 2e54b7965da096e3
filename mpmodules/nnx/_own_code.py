"""Calls of nnx ports whose own code multiplies: traced as pure functions, and run under autocast."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules import _carries as carries
from mpmodules._own_code import ASKED_FOR, LAYERS_ONLY, Shown, described, told_apart, tracing
from mpmodules._port_options import OwnCode
from mpmodules._references import is_reference
from mpmodules.nnx._tracing import named_modules
from policy.amp.ported import Ported, traced
from policy.casting import cast_array
from policy.policy import Policy
from policy.precedence import warn_once
from policy.tracing import is_array

Place = tuple[int, tuple[Any, ...]]
Attributes = dict[Place, dict[str, Any]]
_OF_FLAX = ("_pytree__", "_object__")  # how the names of what Flax keeps on a module begin


class OwnCodeOf:
    """The choice of how a foreign module's own code runs in a port, and the results of looking at its methods' calls.

    It is static metadata of the module: copies share it, and two are equal where the code runs alike.

    Attributes:
      asked: "autocast", "keep", or None: under autocast where the code multiplies, or needs float32.
    """

    def __init__(self, asked: OwnCode):
        self.asked: OwnCode = asked
        self.known: dict[Hashable, Shown] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnCodeOf) and other.asked == self.asked

    def __hash__(self) -> int:
        return hash((OwnCodeOf, self.asked))

    def __repr__(self) -> str:
        return f"OwnCodeOf({self.asked!r})"

    def __reduce__(self) -> Any:
        return OwnCodeOf, (self.asked,)


def own_code_of(module: Any) -> OwnCodeOf | None:
    """Returns the note on a foreign module of a port; None of other modules."""
    return vars(module).get("_own_code")


def call_port(
    module: Any,
    note: OwnCodeOf,
    name: str,
    plainly: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inside: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Calls the outermost method of a port, its own code under autocast where it multiplies.

    Args:
      module: a foreign module of the port.
      note: the module's.
      name: the method's.
      plainly: calls the method as it is.
      args, kwargs: its arguments.
      inside: a context in which calls are no outermost ones.
    """
    if note.asked == "keep":
        return plainly()
    policy: Policy = module.dtype_policy
    key = name, told_apart(args, kwargs)
    shown = ASKED_FOR if note.asked else note.known.get(key)
    if shown == LAYERS_ONLY:
        return plainly()
    try:
        with inside():
            call = _Call(module, name, args, kwargs)
    except Exception:
        if shown is not None:
            raise
        # Code that asks for another dtype, or one with an error, is called as it is: it says itself what is wrong.
        outputs = plainly()
        note.known[key] = LAYERS_ONLY  # not before: what fails in either way shows nothing
        return outputs
    if shown is None:
        shown = note.known[key] = described(type(module).__name__, call.ported, *_classes_and_shares(module))
        if not shown.autocasts:
            return plainly()
    if shown.text:  # by the first call, whose shares may be others
        warn_once(next(known.text for known in note.known.values() if known.text))
    return carries.cast_outputs(policy, call.run(policy), has_carry=False)


class _Call:
    """A call of a module as one of a pure function: state goes in and out.

    Attributes:
      ported: the call, traced.
      attributes: the static attributes that it set, by node and module path.
    """

    def __init__(self, module: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]):
        leaves, treedef = jax.tree.flatten((module, args, kwargs), is_leaf=is_reference)
        is_node = [isinstance(leaf, (flax_nnx.Module, flax_nnx.Pytree, flax_nnx.Variable)) for leaf in leaves]
        self.nodes = tuple(leaf for leaf, is_one in zip(leaves, is_node, strict=True) if is_one)
        inputs = [leaf for leaf, is_one in zip(leaves, is_node, strict=True) if not is_one]
        graph, params, rest = flax_nnx.split(self.nodes, flax_nnx.Param, ...)

        def pure(params: Any, rest: Any, inputs: Any) -> Any:
            nodes = flax_nnx.merge(graph, params, rest, copy=True)
            merged, given = iter(nodes), iter(inputs)
            filled = [next(merged) if is_one else next(given) for is_one in is_node]
            root, args, kwargs = jax.tree.unflatten(treedef, filled)
            with named_modules(nodes), tracing():
                before = _attributes(nodes)
                out = getattr(root, name)(*args, **kwargs)
                self.attributes = _set_since(before, _attributes(nodes))
            return out, flax_nnx.state(nodes)

        self.attributes: Attributes = {}
        self.ported: Ported = traced(pure, params, rest, inputs)

    def run(self, policy: Policy) -> Any:
        """Runs the call, and puts what it changed of the state in place."""
        out, state = self.ported.run(policy)
        before = dict(flax_nnx.to_flat_state(flax_nnx.state(self.nodes)))
        changed = [
            (path, _as_stored(new, before[path]) if path in before else new)
            for path, new in flax_nnx.to_flat_state(state)
            if path not in before or not _is_same(new, before[path])
        ]
        if changed:
            flax_nnx.update(self.nodes, flax_nnx.from_flat_state(changed))
        modules = _modules(self.nodes)
        for place, attributes in self.attributes.items():
            for name, value in attributes.items() if place in modules else ():
                setattr(modules[place], name, value)
        return out


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


def _classes_and_shares(module: Any) -> tuple[dict[tuple[str, ...], str], dict[str, float]]:
    """Returns the class of the module at each path, and the shares of the parameters that foreign ones hold."""
    name, total = type(module).__name__, 0
    classes: dict[tuple[str, ...], str] = {}
    sizes: collections.Counter[str] = collections.Counter()
    for path, child in flax_nnx.iter_modules(module):
        classes[(name, *map(str, path))] = type(child).__name__
        for _, value in flax_nnx.iter_children(child):
            if isinstance(value, flax_nnx.Param):
                size = sum(leaf.size for leaf in jax.tree.leaves(value))
                total += size
                if own_code_of(child) is not None:
                    sizes[type(child).__name__] += size
    return classes, {cls: size / total for cls, size in sizes.items()} if total else {}
