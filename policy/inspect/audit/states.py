"""State that passes from call to call: arguments and outputs matched by their key paths."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from policy.programs.tracing.trace import Traced

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


def states_of(traced: Traced) -> tuple[State, ...]:
    """Returns the arguments and outputs of a call that share a key path, shape and dtype.

    The key path of an argument starts below the argument, or with its name. The key path of an
    output starts at the returned tree, or below its outermost key. So ``step(params, state,
    batch)`` may return ``params, state, loss``, a dictionary of them, or one of them alone. Arrays
    without keys are not state. Key paths of indices alone match only in trees of the same layout.
    """
    tree = jax.tree.unflatten(traced.arguments.treedef, traced.arguments.is_array)
    given = [path for path, is_array in jax.tree.leaves_with_path(tree) if is_array]
    returned = [path for path, _ in jax.tree.leaves_with_path(traced.shape)]
    before, after = traced.jaxpr.in_avals, traced.jaxpr.out_avals
    outputs = [*_trees(returned, after, 0).values(), *_trees(returned, after, 1).values()]
    names = _parameters(traced.called)
    found: dict[State, None] = {}
    for (_, which), argument in _trees(given, before, 2).items():
        name = names.get(which, "") if isinstance(which, int) else which
        for keys, leaf in argument.items() if name not in _NO_STATE else ():
            text = f"{name}{jax.tree_util.keystr(given[leaf.place][2:])}"
            for each, output in itertools.product((keys, (name, *keys)), outputs):
                out = output.get(each)
                is_known = any(not isinstance(key, int) for key in each) or argument == output
                if keys and out is not None and leaf == out and is_known:
                    found[State(leaf.place, out.place, text)] = None
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array of a pytree; equal to those of its shape and dtype.

    Attributes:
      place: its position among the program's arrays.
    """

    place: int = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: Any


def _trees(paths: Sequence[Any], avals: Sequence[Any], depth: int) -> dict[Keys, dict[Keys, _Leaf]]:
    """Returns the trees at a depth by the key paths to them: arrays by the key paths below."""
    trees: dict[Keys, dict[Keys, _Leaf]] = defaultdict(dict)
    # Not strict: gradients come after the outputs of the call.
    for place, (path, aval) in enumerate(zip(paths, avals, strict=False)):
        keys = _keys(path)
        trees[keys[:depth]][keys[depth:]] = _Leaf(place, aval.shape, aval.dtype)
    return trees


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
