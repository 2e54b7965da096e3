"""State that goes into a call and comes out of it: arguments and outputs that belong together, by their key paths."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from policy.tracing import Traced

Keys = tuple[Any, ...]
# What an optimizer is given under these names is no state: what it makes of it is another thing.
_NO_STATE = frozenset(("updates", "grads", "gradients", "cotangents"))


class State(NamedTuple):
    """An argument of a program, and an output that may be its next value.

    Attributes:
      argument, output: their places among the program's arrays.
      name: the argument's key path, as ``state['ema']['w']``.
    """

    argument: int
    output: int
    name: str


class _Leaf(NamedTuple):
    """An array of a tree: its place among the program's arrays, its keys, the tree it is in, and its name."""

    place: int
    keys: Keys
    tree: Any
    name: str


def states_of(traced: Traced) -> tuple[State, ...]:
    """Returns the arguments and outputs of a call that share a key path, shape and dtype.

    The path of an argument is the one below the argument, or with its name before it; that of an output the one in all
    that is returned, or below its outermost key. So ``step(params, state, batch)`` may return ``params, state, loss``,
    a dictionary of them, or one of them alone. Arrays without keys are no state. Keys that are indices alone match in
    trees of one structure only.
    """
    arguments: dict[Keys, list[_Leaf]] = defaultdict(list)
    for leaf in _arguments(traced):
        arguments[leaf.keys].append(leaf)
    found: dict[State, None] = {}
    for out in _outputs(traced):
        for leaf in arguments[out.keys]:
            is_named = any(not isinstance(key, int) for key in out.keys)
            if is_named or (out.tree is not None and leaf.tree == out.tree):
                found[State(leaf.place, out.place, leaf.name)] = None
    return tuple(found)


def _arguments(traced: Traced) -> Iterator[_Leaf]:
    """The arrays among a call's arguments that have keys, under each of their paths."""
    tree = jax.tree.unflatten(traced.arguments.treedef, _marked(traced.arguments.is_array))
    places = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
    parameters = _parameters(traced.called)
    structures: dict[Keys, Any] = {}
    for path, place in places:
        keys = _keys(path)
        which, rest = keys[:2], keys[2:]
        name = which[1] if isinstance(which[1], str) else parameters.get(which[1], which[1])
        if place is None or not rest or name in _NO_STATE:
            continue
        if which not in structures:
            structures[which] = _structure(tree[which[0]][which[1]], traced.jaxpr.in_avals)
        text = f"{name if isinstance(name, str) else ''}{jax.tree_util.keystr(path[2:])}"
        for each in (rest, (name, *rest)) if isinstance(name, str) else (rest,):
            yield _Leaf(place, each, structures[which], text)


def _marked(is_array: tuple[bool, ...]) -> list[int | None]:
    """The place of each array among the arrays; None of what is none."""
    places = iter(range(len(is_array)))
    return [next(places) if marked else None for marked in is_array]


def _outputs(traced: Traced) -> Iterator[_Leaf]:
    """The arrays that a call returns, under each of their paths that is not empty."""
    treedef = jax.tree.structure(traced.shape)
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    whole = _structure(tree, traced.jaxpr.out_avals)
    parts: dict[Any, Any] = {}
    for path, place in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = _keys(path)
        if not keys:
            continue
        yield _Leaf(place, keys, whole, "")
        if keys[1:]:
            if keys[0] not in parts:
                parts[keys[0]] = _structure(_child(tree, keys[0]), traced.jaxpr.out_avals)
            yield _Leaf(place, keys[1:], parts[keys[0]], "")


def _child(tree: Any, key: Any) -> Any:
    """A part of a tuple, list or dictionary; of other containers, whose keys are names, None."""
    return tree[key] if isinstance(tree, (tuple, list, dict)) and not isinstance(key, str) else None


def _structure(tree: Any, avals: Any) -> Any:
    """The structure of a tree of places with shapes and dtypes; equal ones compare equal."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    return treedef, tuple(None if place is None else (avals[place].shape, avals[place].dtype) for place in leaves)


def _keys(path: Any) -> Keys:
    """The keys of a path, whatever containers they are of."""
    return tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)


def _parameters(fn: Any) -> dict[Any, str]:
    """The names of a function's positional parameters, by their places."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {i: p.name for i, p in enumerate(parameters) if p.kind in positional}
