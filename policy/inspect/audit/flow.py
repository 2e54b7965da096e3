"""Flow of dtypes through a program: values widened from half precision, and their leaks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from policy.core.requested_dtypes import Asked
from policy.inspect.audit.lost_constants import Lost
from policy.inspect.audit.states import State
from policy.programs.codes import is_eight_bits as is_eight_bits
from policy.programs.dependence import is_cotangent as is_cotangent
from policy.programs.graph import Graph, Node, Value, is_joint
from policy.programs.operations import is_inexact_name, kind_of
from policy.programs.primitives import MOVES_DATA

_MATMULS = ("dot", "convolution")


@functools.cache
def bits(dtype: str) -> int:
    """Returns the width in bits of a real floating dtype, by its name; 0 for any other."""
    if not is_inexact_name(dtype) or dtype.startswith("complex"):
        return 0
    digits = "".join(c if c.isdigit() else " " for c in dtype.split("_")[0]).split()
    return int(digits[0]) if digits else 0


def is_narrow(dtype: str) -> bool:
    """Returns whether a dtype is floating and narrower than float32."""
    return 0 < bits(dtype) < 32


def is_wide(dtype: str) -> bool:
    """Returns whether a dtype is float32 or float64."""
    return bits(dtype) >= 32


def is_complex(dtype: str) -> bool:
    """Returns whether a dtype is complex."""
    return dtype.startswith("complex")


def is_cast(node: Node) -> bool:
    """Returns whether a node casts between real floating dtypes."""
    return (
        node.name == "convert_element_type"
        and bits(node.inputs[0].dtype) > 0
        and bits(node.out.dtype) > 0
    )


def widens(node: Node) -> bool:
    return is_cast(node) and is_narrow(node.inputs[0].dtype) and is_wide(node.out.dtype)


def narrows(node: Node) -> bool:
    return is_cast(node) and is_wide(node.inputs[0].dtype) and is_narrow(node.out.dtype)


def is_matmul(node: Node) -> bool:
    return kind_of(node.name) in _MATMULS and not is_joint(node)


def made_of(value: Value) -> Value:
    """Returns the value that this one is a view of, through layout operations."""
    while value.maker is not None and value.maker.name in MOVES_DATA and value.maker.inputs:
        value = value.maker.inputs[0]
    return value


def is_layout(node: Node) -> bool:
    """Returns whether a node moves numbers without changing any."""
    return node.name in MOVES_DATA


def reached(values: Iterable[Value], passes: Callable[[Node], bool] = is_layout) -> Iterator[Value]:
    """Yields values, and all values derived from them through nodes that `passes` accepts."""
    waiting = list(values)
    seen = set(map(id, waiting))
    while waiting:
        value = waiting.pop()
        yield value
        fresh = [
            out
            for node in value.readers
            if passes(node)
            for out in node.outputs
            if id(out) not in seen
        ]
        seen.update(map(id, fresh))
        waiting.extend(fresh)


def users(value: Value, passes: Callable[[Node], bool] = is_layout) -> Iterator[Node]:
    """Yields the nodes that compute with a value, looking through nodes that `passes` accepts."""
    return (node for each in reached([value], passes) for node in each.readers if not passes(node))


def is_returned(value: Value) -> bool:
    """Returns whether the program returns a value or a view of it."""
    return any(each.is_output for each in reached([value]))


class Flow:
    """The widened values of a program and their leaks.

    Attributes:
      graph: the program.
      lost: constants that overflowed or vanished while it was traced.
      states: arguments and outputs that may be one state, before and after the call.
      asked: the dtypes requested while it was traced.
      matmuls: its matmuls and convolutions.
      multiplies_in_half: whether a matmul in it has only half operands, or 8-bit ones.
    """

    def __init__(
        self,
        graph: Graph,
        lost: Lost | None = None,
        states: Sequence[State] = (),
        asked: Asked | None = None,
    ):
        self.graph = graph
        self.lost = Lost() if lost is None else lost
        self.states = states
        self.asked = Asked() if asked is None else asked
        self.matmuls = [node for node in graph.nodes if is_matmul(node)]
        self.multiplies_in_half = any(
            all(is_narrow(v.dtype) or v.dtype == "int8" for v in node.inputs[:2])
            for node in self.matmuls
        )
        self._widenings = self._find_widenings()
        self._leaking = self._find_leaks()

    def widening(self, value: Value) -> Node | None:
        """Returns the node that widened a half value to this one, or None.

        It is the nearest cast to a wide dtype, or matmul of a half operand with a wide result. A
        value that was narrowed in between is no longer wide.
        """
        return self._widenings.get(id(value))

    def leaks(self, value: Value) -> bool:
        """Returns whether a wide or complex value leaks.

        It leaks if it reaches a matmul, a loop's carry, an output of the program, or another
        module's arithmetic before it is narrowed.
        """
        return id(value) in self._leaking

    def _find_widenings(self) -> dict[int, Node]:
        found: dict[int, Node] = {}
        for node in self.graph.nodes:
            if widens(node) or (
                is_matmul(node) and any(is_narrow(v.dtype) for v in operands(node))
            ):
                origin: Node | None = node
            else:
                origin = next((found[id(v)] for v in node.inputs if id(v) in found), None)
            if origin is not None:
                found.update((id(out), origin) for out in node.outputs if is_wide(out.dtype))
        return found

    def _find_leaks(self) -> set[int]:
        leaking: set[int] = set()
        for node in reversed(self.graph.nodes):
            for value in node.outputs:
                is_wider = is_wide(value.dtype) or is_complex(value.dtype)
                if is_wider and (
                    value.is_output or any(_leaks(value, r, leaking) for r in value.readers)
                ):
                    leaking.add(id(value))
        return leaking


def operands(node: Node) -> list[Value]:
    """Returns the floating operands of a matmul."""
    return [value for value in node.inputs if bits(value.dtype)]


def _leaks(value: Value, reader: Node, leaking: set[int]) -> bool:
    """Returns whether a value leaks through a reader; `leaking` holds later values that leak."""
    if is_cotangent(reader) and not (value.maker is not None and is_cotangent(value.maker)):
        return False  # residuals have a check of their own
    if is_matmul(reader) or reader.name == "carry":
        return True
    if narrows(reader):
        return False
    if reader.name in MOVES_DATA or is_cast(reader) or is_joint(reader):
        return any(id(out) in leaking for out in reader.outputs)
    results = [out for out in reader.outputs if is_wide(out.dtype) or is_complex(out.dtype)]
    if not results:  # a comparison, an index or an effect
        return False
    maker = made_of(value).maker
    home, there = () if maker is None else maker.site.path, reader.site.path
    return there[: len(home)] != home or any(id(out) in leaking for out in results)
