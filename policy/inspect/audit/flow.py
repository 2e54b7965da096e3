"""A traced call as checks read it: its values, walks from one to another, and its states."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policy.core.precedence import Asked
from policy.inspect.traced.authors import is_users_file
from policy.programs import primitives as ops
from policy.programs.dtypes import is_eight_bits as is_eight_bits
from policy.programs.reading.graph import Graph, Node, Value, is_joint, readers_past
from policy.programs.reading.graph import is_cotangent as is_cotangent
from policy.programs.tracing.trace import Traced

Passes = Callable[[Node], bool]
"""Tells whether a walk goes on through a node."""

OperandsOf = Callable[[Node], Iterable[Value]]
"""Gives the operands of a node that a walk goes on with."""

LARGEST = 4096  # the size of the largest captured array that is read
_DEEP = 40  # the longest chain of operations that is followed
_UNIT = ops.BOUNDED | ops.PERIODIC | {"sign"}
_KEPT = ops.MOVES_DATA | ops.ANNOTATES | ops.CASTS | {"row", "rows"}
_ORDERED = ops.EXTREMES | ops.ORDERS


@functools.cache
def bits(dtype: str) -> int:
    """Returns the width in bits of a real floating dtype, by its name; 0 for any other."""
    found = re.match(r"b?float(\d+)", dtype)
    return int(found[1]) if found else 0


def is_narrow(dtype: str) -> bool:
    """Returns whether a dtype is floating and narrower than float32."""
    return 0 < bits(dtype) < 32


def is_wide(dtype: str) -> bool:
    """Returns whether a dtype is float32 or float64."""
    return bits(dtype) >= 32


def is_sixteen_bits(dtype: str) -> bool:
    """Returns whether a dtype is floating, and of more than 8 bits but less than 32."""
    return 8 < bits(dtype) < 32


def is_complex(dtype: str) -> bool:
    """Returns whether a dtype is complex."""
    return dtype.startswith("complex")


def is_cast(node: Node) -> bool:
    """Returns whether a node casts between real floating dtypes."""
    is_conversion = node.name == "convert_element_type"
    return is_conversion and bits(node.inputs[0].dtype) > 0 and bits(node.out.dtype) > 0


def widens(node: Node) -> bool:
    """Returns whether a node casts a value from half precision to float32 or float64."""
    return is_cast(node) and is_narrow(node.inputs[0].dtype) and is_wide(node.out.dtype)


def narrows(node: Node) -> bool:
    """Returns whether a node casts a value from float32 or float64 to half precision."""
    return is_cast(node) and is_wide(node.inputs[0].dtype) and is_narrow(node.out.dtype)


def is_matmul(node: Node) -> bool:
    """Returns whether a node is a matmul or a convolution."""
    return node.kind in ("dot", "convolution")


def is_layout(node: Node) -> bool:
    """Returns whether a node moves numbers without changing any."""
    return node.name in ops.MOVES_DATA


def is_view(node: Node) -> bool:
    """Returns whether a node moves or casts numbers."""
    return is_layout(node) or is_cast(node)


def is_selection(node: Node) -> bool:
    """Returns whether a node selects from all of its inputs but the first."""
    return node.name in ("select_n", "branch")


def operands(node: Node) -> list[Value]:
    """Returns the floating operands of a matmul."""
    return [value for value in node.inputs if bits(value.dtype)]


# --------------------------------------------------------------------------------------------------
# Towards the arguments
# --------------------------------------------------------------------------------------------------


def moved_from(node: Node, value: Value) -> Value:
    """Returns the operand that a data movement makes a result of."""
    is_one_for_each = len(node.outputs) == len(node.inputs)
    return node.inputs[node.outputs.index(value) if is_one_for_each else 0]


def views(value: Value, passes: Passes = is_layout) -> Iterator[Value]:
    """Yields a value, and those that it is a view of, through nodes that `passes` accepts."""
    yield value
    while value.maker is not None and value.maker.inputs and passes(value.maker):
        value = moved_from(value.maker, value)
        yield value


def made_of(value: Value, passes: Passes = is_layout) -> Value:
    """Returns the first value that this one is a view of."""
    *_, first = views(value, passes)
    return first


def behind(value: Value, operands: OperandsOf, most: float = math.inf) -> Iterator[Value]:
    """Yields a value, and those that it is computed from; `most` at most."""
    return followed([value], lambda one: () if one.maker is None else operands(one.maker), most)


def makers(value: Value, operands: OperandsOf, most: float = math.inf) -> Iterator[Node]:
    """Yields the nodes that make a value and those `behind` it."""
    return (one.maker for one in behind(value, operands, most) if one.maker is not None)


def in_order(value: Value, goes_on: Passes) -> Iterator[Node]:
    """Yields the nodes that a value is made by within one iteration of every loop, the first ones
    first. Nodes that `goes_on` rejects, and those that only they depend on, are left out.
    """
    seen, waiting = set[Node](), [(value.maker, False)]
    while waiting:
        node, is_next = waiting.pop()
        if node is not None and is_next:
            yield node
        elif node is not None and node not in seen and node.name != "carry" and goes_on(node):
            seen.add(node)
            waiting += [(node, True), *((one.maker, False) for one in node.inputs)]


# --------------------------------------------------------------------------------------------------
# Towards the results
# --------------------------------------------------------------------------------------------------


def reached(values: Iterable[Value], passes: Passes = is_layout) -> Iterator[Value]:
    """Yields values, and all values derived from them through nodes that `passes` accepts."""

    def results(value: Value) -> list[Value]:
        return [out for node in value.readers if passes(node) for out in node.outputs]

    return followed(values, results)


def users(value: Value, passes: Passes = is_layout) -> Iterator[Node]:
    """Yields the nodes that compute with a value, looking through nodes that `passes` accepts."""
    return (node for node in readers_past([value], passes) if not passes(node))


def followed(
    values: Iterable[Value], following: Callable[[Value], Iterable[Value]], most: float = math.inf
) -> Iterator[Value]:
    """Yields values, and those that `following` gives for each of them, once; `most` at most."""
    waiting = list(values)
    seen = set(waiting)
    while waiting and len(seen) < most:
        value = waiting.pop()
        yield value
        fresh = [one for one in following(value) if one not in seen]
        seen.update(fresh)
        waiting.extend(fresh)


# --------------------------------------------------------------------------------------------------
# Equality and ranges
# --------------------------------------------------------------------------------------------------


def is_constant(value: Value) -> bool:
    """Returns whether a value is a number that the program holds, cast or repeated."""
    return made_of(value, lambda node: node.name in ops.MOVES_DATA | ops.CASTS).array is not None


def are_equal(one: Value, other: Value, depth: int = 12) -> bool:
    """Returns whether the program shows that two values hold the same numbers.

    They do if they are rearrangements of one value, or results of the same operations on equal
    operands.

    Args:
      depth: the longest chain of operations that is compared.
    """
    one, other = (made_of(v, lambda node: node.name in ops.REARRANGES) for v in (one, other))
    if one is other:
        return True
    first, second = one.maker, other.maker
    if first is None or second is None or not depth or is_joint(first) or is_joint(second):
        return one.is_literal and other.is_literal and bool(one.array == other.array)
    if first.name != second.name or len(first.inputs) != len(second.inputs) or not first.inputs:
        return False
    if first.outputs.index(one) != second.outputs.index(other):
        return False
    if str(first.params) != str(second.params):
        return False
    return all(are_equal(a, b, depth - 1) for a, b in zip(first.inputs, second.inputs, strict=True))


class Interval(NamedTuple):
    """The numbers from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf


def interval_of(value: Value, depth: int = _DEEP) -> Interval:
    """Returns an interval that holds all numbers of a value, NaN aside.

    It follows from the limits that the program itself sets.
    """
    if value.array is not None:
        numbers = numbers_in(value.array)
        numbers = numbers[~np.isnan(numbers)]
        return Interval(float(numbers.min()), float(numbers.max())) if numbers.size else Interval()
    held = _of_dtype(value.dtype)
    maker = value.maker
    if maker is None or not depth or not maker.inputs:
        return held
    found = _made(maker, value, lambda one: interval_of(one, depth - 1))
    return Interval(max(held.low, found.low), min(held.high, found.high))


def numbers_in(array: object) -> np.ndarray:
    """Returns the numbers of a small real array, in float64; none of any other object."""
    if not isinstance(array, np.ndarray) or array.size > LARGEST or np.iscomplexobj(array):
        return np.empty(0)
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    return array.astype(np.float64).ravel() if is_number else np.empty(0)


def _of_dtype(dtype: str) -> Interval:
    """Returns the numbers that an array has by its dtype alone.

    Floats of 16 bits or more have any, as they may be infinite.
    """
    if dtype == "bool":
        return Interval(0, 1)
    if "int" not in dtype and not 0 < bits(dtype) <= 8:
        return Interval()
    info = jnp.iinfo(dtype) if "int" in dtype else jnp.finfo(dtype)
    return Interval(float(info.min), float(info.max))


def _made(node: Node, value: Value, of: Callable[[Value], Interval]) -> Interval:
    """Returns the interval of a node's result, given `of` for its inputs."""
    if node.name in _UNIT:
        return Interval(-1, 1)
    if is_selection(node) or node.name in ops.PLACES:
        each = list(map(of, node.inputs[is_selection(node) :]))
        return Interval(min(one.low for one in each), max(one.high for one in each))
    # The places of the largest are integers, and none of the numbers.
    is_ordered = node.name in _ORDERED and bool(bits(value.dtype))
    if node.name in _KEPT or is_ordered:
        return of(moved_from(node, value))
    if node.name not in ARITHMETIC:
        return Interval()
    return _computed(ARITHMETIC[node.name], list(map(of, node.inputs)))


def _computed(function: Callable[..., float], operands: list[Interval]) -> Interval:
    """Returns the range of a function that is monotone in each operand, below and above zero."""
    ends = [(*one, 0.0) if one.low < 0 < one.high else one for one in operands]
    with np.errstate(all="ignore"):
        found = [float(function(*each)) for each in itertools.product(*ends)]
    return Interval() if any(map(math.isnan, found)) else Interval(min(found), max(found))


def _product(x: float, y: float) -> float:
    return 0.0 if 0 in (x, y) else x * y  # zero times a limit that is infinite


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "add": np.add,
    "sub": np.subtract,
    "mul": _product,
    "div": lambda x, y: _product(x, 1 / y) if y else math.nan,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
"""Functions of numbers, by primitive."""


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
      widenings: the node that widened a half value to a wide one: the nearest cast to a wide dtype,
        or matmul of a half operand with a wide result. A value that was narrowed in between is no
        longer wide.
      leaking: the wide and complex values that reach a matmul, a loop's carry, an output of the
        program, or another module's arithmetic before they are narrowed.
    """

    def __init__(self, graph: Graph, lost: Lost, states: Sequence[State], asked: Asked):
        self.graph, self.lost, self.states, self.asked = graph, lost, states, asked
        self.operations = [node for node in graph.nodes if not is_joint(node)]
        self.forward = [node for node in self.operations if not is_cotangent(node)]
        self.matmuls = list(filter(is_matmul, self.operations))
        pairs = [[value.dtype for value in node.inputs[:2]] for node in self.matmuls]
        halves = (all(is_narrow(one) or one == "int8" for one in pair) for pair in pairs)
        self.multiplies_in_half = any(halves)
        self.widenings: dict[Value, Node] = {}
        for node in graph.nodes:
            is_of_half = is_matmul(node) and any(is_narrow(v.dtype) for v in operands(node))
            behind = (self.widenings[v] for v in node.inputs if v in self.widenings)
            origin = node if widens(node) or is_of_half else next(behind, None)
            if origin is not None:
                self.widenings.update((v, origin) for v in node.outputs if is_wide(v.dtype))
        self.leaking: set[Value] = set()
        for node in reversed(graph.nodes):
            for value in filter(_is_wider, node.outputs):
                if value.is_output or any(_leaks(value, r, self.leaking) for r in value.readers):
                    self.leaking.add(value)


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
    home = () if maker is None else maker.path
    return reader.path[: len(home)] != home or is_one_there


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
