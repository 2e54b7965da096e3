"""State that passes from call to call: arguments and outputs matched by their key paths."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from policy.programs.trace import Traced

Keys = tuple[Any, ...]
# Not state: an optimizer returns its updates under the key paths of the gradients.
_NO_STATE = frozenset(("updates", "cotangents", "gradients", "gradient", "grads", "grad", "g"))


class State(NamedTuple):
    """An argument of a program, and an output that may be its next value.

    Attributes:
      argument, output: their positions among the program's arrays.
      name: the argument's key path, as ``state['ema']['w']``.
    """

    argument: int
    output: int
    name: str


class _Leaf(NamedTuple):
    """An array of a pytree.

    Attributes:
      place: its position among the program's arrays.
      keys: its key path.
      layout: the key paths, shapes and dtypes of all arrays in the tree that the path starts from.
      name: its name in messages.
    """

    place: int
    keys: Keys
    layout: Any
    name: str = ""


def states_of(traced: Traced) -> tuple[State, ...]:
    """Returns the arguments and outputs of a call that share a key path, shape and dtype.

    The key path of an argument starts below the argument, or with its name. The key path of an
    output starts at the returned tree, or below its outermost key. So ``step(params, state,
    batch)`` may return ``params, state, loss``, a dictionary of them, or one of them alone. Arrays
    without keys are not state. Key paths of indices alone match only in trees of the same layout.
    """
    outputs: dict[Keys, list[_Leaf]] = defaultdict(list)
    for leaf in _outputs(traced):
        outputs[leaf.keys].append(leaf)
    found: dict[State, None] = {}
    for leaf in _arguments(traced):
        is_named = any(not isinstance(key, int) for key in leaf.keys)
        for out in outputs[leaf.keys]:
            is_alike = _of(traced.jaxpr.in_avals[leaf.place]) == _of(
                traced.jaxpr.out_avals[out.place]
            )
            if is_alike and (is_named or leaf.layout == out.layout):
                found[State(leaf.place, out.place, leaf.name)] = None
    return tuple(found)


def _arguments(traced: Traced) -> Iterator[_Leaf]:
    """Yields the arrays with keys among a call's arguments, once for each key path."""
    tree = jax.tree.unflatten(traced.arguments.treedef, traced.arguments.is_array)
    marked = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [path for path, is_array in marked if is_array]
    layouts = _layouts(
        ((_keys(path)[:2], _keys(path)[2:]) for path in paths), traced.jaxpr.in_avals
    )
    parameters = _parameters(traced.called)
    for place, path in enumerate(paths):
        (kind, which), keys = _keys(path)[:2], _keys(path)[2:]
        name = parameters.get(which, "") if isinstance(which, int) else which
        if not keys or name in _NO_STATE:
            continue
        for each in (keys, (name, *keys)) if name else (keys,):
            yield _Leaf(
                place, each, layouts[kind, which], f"{name}{jax.tree_util.keystr(path[2:])}"
            )


def _outputs(traced: Traced) -> Iterator[_Leaf]:
    """Yields the arrays that a call returns, once for each of their nonempty key paths."""
    paths = [_keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(traced.shape)[0]]
    whole = _layouts((((), keys) for keys in paths), traced.jaxpr.out_avals)
    parts = _layouts(((keys[:1], keys[1:]) for keys in paths), traced.jaxpr.out_avals)
    for place, keys in enumerate(paths):
        if keys:
            yield _Leaf(place, keys, whole[()])
        if keys[1:]:
            yield _Leaf(place, keys[1:], parts[keys[:1]])


def _layouts(paths: Iterable[tuple[Keys, Keys]], avals: Sequence[Any]) -> dict[Keys, Any]:
    """Returns the layout of each tree, from pairs of a tree's and an array's key path."""
    layouts: dict[Keys, list[Any]] = defaultdict(list)
    # Not strict: gradients come after the outputs of the call.
    for aval, (tree, keys) in zip(avals, paths, strict=False):
        layouts[tree].append((keys, _of(aval)))
    return layouts


def _of(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype


def _keys(path: Any) -> Keys:
    """Returns the keys of a path, for containers of any type."""
    return tuple(
        getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path
    )


def _parameters(fn: Any) -> dict[int, str]:
    """Returns the names of a function's positional parameters, by position."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {i: p.name for i, p in enumerate(parameters) if p.kind in positional}
