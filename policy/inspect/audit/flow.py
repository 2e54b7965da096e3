"""Flow of dtypes through a program: values widened from half precision, and their leaks."""

from __future__ import annotations

from collections.abc import Sequence

from policy.core.precedence import Asked
from policy.inspect.audit.lost_constants import Lost
from policy.inspect.audit.states import State
from policy.inspect.audit.values import (
    is_cast,
    is_complex,
    is_cotangent,
    is_layout,
    is_matmul,
    is_narrow,
    is_wide,
    made_of,
    narrows,
    operands,
    widens,
)
from policy.programs.reading.graph import Graph, Node, Value, is_joint


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
            is_of_half = is_matmul(node) and any(is_narrow(v.dtype) for v in operands(node))
            behind = (found[id(v)] for v in node.inputs if id(v) in found)
            origin = node if widens(node) or is_of_half else next(behind, None)
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


def _leaks(value: Value, reader: Node, leaking: set[int]) -> bool:
    """Returns whether a value leaks through a reader; `leaking` holds later values that leak."""
    if is_cotangent(reader) and not (value.maker is not None and is_cotangent(value.maker)):
        return False  # residuals have a check of their own
    if is_matmul(reader) or reader.name == "carry":
        return True
    if narrows(reader):
        return False
    if is_layout(reader) or is_cast(reader) or is_joint(reader):
        return any(id(out) in leaking for out in reader.outputs)
    results = [out for out in reader.outputs if is_wide(out.dtype) or is_complex(out.dtype)]
    if not results:  # a comparison, an index or an effect
        return False
    maker = made_of(value).maker
    home, there = () if maker is None else maker.site.path, reader.site.path
    return there[: len(home)] != home or any(id(out) in leaking for out in results)
