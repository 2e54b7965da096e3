"""A traced call as checks read it: its program, widened values, states and lost constants."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from policy.core.precedence import Asked
from policy.inspect.audit.values import (
    is_complex,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_view,
    is_wide,
    made_of,
    narrows,
    operands,
    widens,
)
from policy.programs.reading.graph import Graph, Node, Value, is_joint
from policy.programs.reading.walk import is_users_file
from policy.programs.tracing.trace import Traced

_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
Keys = tuple[Any, ...]
# Not state: an optimizer returns its updates under the key paths of the gradients.
_NO_STATE = frozenset(("updates", "cotangents", "gradients", "gradient", "grads", "grad", "g"))

# --------------------------------------------------------------------------------------------------
# Widened values
# --------------------------------------------------------------------------------------------------


class Flow:
    """The widened values of a program and their leaks.

    Attributes:
      graph: the program.
      lost: constants that overflowed or vanished while it was traced.
      states: arguments and outputs that may be one state, before and after the call.
      asked: the dtypes requested while it was traced.
      operations: its nodes that are operations, and no joints of programs.
      forward: those of them in the forward pass.
      matmuls: its matmuls and convolutions.
      multiplies_in_half: whether a matmul in it has only half operands, or 8-bit ones.
    """

    def __init__(self, graph: Graph, lost: Lost, states: Sequence[State], asked: Asked):
        self.graph, self.lost, self.states, self.asked = graph, lost, states, asked
        self.operations = [node for node in graph.nodes if not is_joint(node)]
        self.forward = [node for node in self.operations if not is_cotangent(node)]
        self.matmuls = list(filter(is_matmul, self.operations))
        pairs = [[value.dtype for value in node.inputs[:2]] for node in self.matmuls]
        halves = (all(is_narrow(one) or one == "int8" for one in pair) for pair in pairs)
        self.multiplies_in_half = any(halves)
        self._widenings: dict[Value, Node] = {}
        for node in graph.nodes:
            is_of_half = is_matmul(node) and any(is_narrow(v.dtype) for v in operands(node))
            behind = (self._widenings[v] for v in node.inputs if v in self._widenings)
            origin = node if widens(node) or is_of_half else next(behind, None)
            if origin is not None:
                self._widenings.update((v, origin) for v in node.outputs if is_wide(v.dtype))
        self._leaking: set[Value] = set()
        for node in reversed(graph.nodes):
            for value in filter(_is_wider, node.outputs):
                if value.is_output or any(_leaks(value, r, self._leaking) for r in value.readers):
                    self._leaking.add(value)

    def widening(self, value: Value) -> Node | None:
        """Returns the node that widened a half value to this one, or None.

        It is the nearest cast to a wide dtype, or matmul of a half operand with a wide result. A
        value that was narrowed in between is no longer wide.
        """
        return self._widenings.get(value)

    def leaks(self, value: Value) -> bool:
        """Returns whether a wide or complex value leaks.

        It leaks if it reaches a matmul, a loop's carry, an output of the program, or another
        module's arithmetic before it is narrowed.
        """
        return value in self._leaking


def _is_wider(value: Value) -> bool:
    return is_wide(value.dtype) or is_complex(value.dtype)


def _leaks(value: Value, reader: Node, leaking: set[Value]) -> bool:
    """Returns whether a value leaks through a reader; `leaking` holds later values that leak."""
    if is_cotangent(reader) and not (value.maker is not None and is_cotangent(value.maker)):
        return False  # residuals have a check of their own
    if is_matmul(reader) or reader.name == "carry":
        return True
    if narrows(reader):
        return False
    is_one_there = not leaking.isdisjoint(reader.outputs)
    if is_view(reader) or is_joint(reader):
        return is_one_there
    if not any(map(_is_wider, reader.outputs)):  # a comparison, an index or an effect
        return False
    maker = made_of(value).maker
    home = () if maker is None else maker.site.path
    return reader.site.path[: len(home)] != home or is_one_there


# --------------------------------------------------------------------------------------------------
# Constants that are lost while a function is traced
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Lost:
    """Lines of user code, as ``model.py:12``, where a constant did not fit into its dtype.

    Attributes:
      overflowed: lines where NumPy reported an overflow.
      vanished: lines where NumPy reported an underflow.
    """

    overflowed: set[str] = dataclasses.field(default_factory=set)
    vanished: set[str] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def noticing() -> Iterator[Lost]:
    """Records the overflows and underflows of NumPy while a function is traced in this thread.

    JAX casts constants with NumPy.
    """
    lost = Lost()

    def note(kind: str, _: int) -> None:
        lines = lost.overflowed if "overflow" in kind else lost.vanished
        lines.add(_line())

    with np.errstate(over="call", under="call", call=note):
        yield lost


def _line() -> str:
    """Returns the innermost line of user code, in the format of reports."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file) and not file.startswith(_NUMPY):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --------------------------------------------------------------------------------------------------
# State that passes from call to call
# --------------------------------------------------------------------------------------------------


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
        keys = tuple(map(_key, path))
        trees[keys[:depth]][keys[depth:]] = _Leaf(place, aval.shape, aval.dtype)
    return trees


def _key(key: Any) -> Any:
    """Returns the key itself of an entry of a path, for containers of any type."""
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def _parameters(fn: Any) -> dict[int, str]:
    """Returns the names of a function's positional parameters, by position."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = inspect.Parameter
    positional = kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD
    return {i: p.name for i, p in enumerate(parameters) if p.kind in positional}
