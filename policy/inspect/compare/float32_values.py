"""Evaluates the float32 trace beside a program, where its constants or its code differ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from policy.inspect.traced.pairing import Reference
from policy.programs.flattened import FlatOperation, Known, Operand, Token
from policy.programs.paths import Path
from policy.programs.placed_interpreter import EnclosingEquations, PlacedValue
from policy.programs.primitives import HOST
from policy.programs.protocols import Equation, OpenJaxpr
from policy.programs.upcast import bound_wide, widen


class _Unavailable(Exception):
    """Raised when a value is read that belongs to a loop without a counterpart."""


def lane_of(
    reference: Reference | None,
    wide: Callable[[PlacedValue], Any],
    missed: dict[Path, None] | None = None,
) -> ReferenceLane | None:
    """Returns the lane of a whole program; None if it has no float32 trace."""
    return (
        None
        if reference is None
        else ReferenceLane(reference, wide, {} if missed is None else missed)
    )


def first_array(value: PlacedValue) -> Any:
    """Returns the float32 operand of an interpreter whose values are one array each."""
    return widen(value.arrays[0])


class ReferenceLane:
    """The known values of the float32 trace in a body of the program and in the enclosing ones.

    Attributes:
      reference: how the program is paired with the trace.
      wide: returns the float32 array of a value of the program.
      missed: collects the paths whose values could not be computed.
    """

    def __init__(
        self,
        reference: Reference,
        wide: Callable[[PlacedValue], Any],
        missed: dict[Path, None],
        around: ReferenceLane | None = None,
        saves: bool = False,
    ):
        self.reference, self.wide, self.missed, self.around = reference, wide, missed, around
        self.saves = saves  # to save memory, enclosing values are rematerialised if possible
        self.values: dict[Token, Any] = {}

    def within(self, body: Literal["open", "checkpoint", "closed"]) -> ReferenceLane:
        """Returns the lane of a body; a closed one reads no enclosing values."""
        around = None if body == "closed" else self
        return ReferenceLane(self.reference, self.wide, self.missed, around, body == "checkpoint")

    # Values given by the run
    # ----------------------------------------------------------------------------------------------

    def enter(
        self, chain: EnclosingEquations, jaxpr: OpenJaxpr, args: Sequence[PlacedValue]
    ) -> None:
        """Records the arguments of a body."""
        for root, value in zip(
            self.reference.inputs.get((chain, id(jaxpr)), ()), args, strict=False
        ):
            self._know(root, value)

    def keep(
        self, chain: EnclosingEquations, equation: Equation, outputs: Sequence[PlacedValue]
    ) -> None:
        """Records the results of an equation."""
        operation = self.reference.made.get((chain, id(equation)))
        if operation is None:
            return
        stacked = operation.stacked
        for i, value in enumerate(outputs[: len(outputs) - len(stacked)]):
            self._know(("result", operation, i), value)
        for root, value in zip(stacked, outputs[len(outputs) - len(stacked) :], strict=True):
            self._know(root, value)

    def _know(self, root: Any, value: PlacedValue) -> None:
        found = None if root is None else self.reference.resolved(root)
        if found is not None:
            self.values[found] = value

    # Values computed in float32
    # --------------------------------------------------------------------------------------------

    def given(self, chain: EnclosingEquations, equation: Equation) -> Iterator[tuple[int, Any]]:
        """Yields the operands that float32 reads in place of those of an equation."""
        operation = self.reference.made.get((chain, id(equation)))
        if operation is None:
            return
        for k, operand in self.reference.given.get(operation.at, {}).items():
            array = self._shaped(operand, equation.invars[k].aval.shape, operation.path)
            if array is not None:
                yield k, array

    def exchanged(self, chain: EnclosingEquations, equation: Equation) -> Iterator[int]:
        """Yields the places of operands that have a counterpart, in whose place float32 reads
        another value.
        """
        operation = self.reference.made.get((chain, id(equation)))
        if operation is None or operation.bodies:
            return
        given = self.reference.given.get(operation.at, {})
        for k, operand in enumerate(operation.operands):
            if k in given and self.reference.resolved(operand.root) is not None:
                yield k

    def made(
        self, chain: EnclosingEquations, equation: Equation, outputs: Sequence[PlacedValue]
    ) -> Iterator[tuple[int, Any]]:
        """Yields the results of an equation that float32 computes in another way."""
        operation = self.reference.made.get((chain, id(equation)))
        if operation is None:
            return
        for i, variable in enumerate(equation.outvars):
            root = ("result", operation, i)
            if root in self.reference.joined:
                array = self._shaped(
                    Operand(self.reference.same[root]), variable.aval.shape, operation.path
                )
                if array is not None:
                    yield i, array

    def outputs(self, values: Sequence[PlacedValue]) -> Iterator[tuple[int, Any]]:
        """Yields the float32 outputs that are not values of the program."""
        for k, operand in self.reference.outputs.items():
            array = self._shaped(operand, values[k].arrays[0].shape, ())
            if array is not None:
                yield k, array

    def _shaped(self, operand: Operand, shape: Sequence[int], path: Path) -> Any:
        array = self._read_or_none(operand)
        if array is None:
            self.missed[path] = None
            return None
        if array.shape == tuple(shape):
            return array
        return (
            jnp.reshape(array, shape)
            if array.size == math.prod(shape)
            else jnp.broadcast_to(array, shape)
        )

    def _read_or_none(self, operand: Operand) -> Any:
        with contextlib.suppress(_Unavailable):
            return self._read(operand)
        if not self.saves:
            return None
        self.saves = False
        try:
            return self._read_or_none(operand)
        finally:
            self.saves = True

    def _read(self, operand: Operand) -> Any:
        array = self._value(operand.root)
        for view in operand.views:
            (array,) = _bound(view, [array])
        return array

    def _value(self, root: Any) -> Any:
        if isinstance(root, Known):
            return widen(root.value)
        found = self._found(root)
        if found is not None:
            return self.wide(found) if isinstance(found, PlacedValue) else found
        if root[0] in ("const", "inner"):
            return widen(self.reference.consts[root[0] == "inner"][root[1]])
        if root[0] != "result":
            raise _Unavailable
        operation: FlatOperation = root[1]
        if (
            operation.bodies
            or operation.stacked
            or operation.equation.effects
            or operation.name in HOST
        ):
            raise _Unavailable
        results = _bound(
            operation.equation, [self._read(operand) for operand in operation.operands]
        )
        self.values.update({("result", operation, i): array for i, array in enumerate(results)})
        return results[root[2]]

    def _found(self, root: Token) -> Any:
        lane: ReferenceLane | None = self
        while lane is not None:
            if root in lane.values:
                return lane.values[root]
            lane = lane.around if not lane.saves or root[0] == "argument" else None
        return None


def _as(array: Any, aval: Any) -> Any:
    """Returns an array in the shape it is read in, as views without repetition are not followed."""
    shape = getattr(aval, "shape", None)
    return array if shape in (None, jnp.shape(array)) else jnp.reshape(array, shape)


def _bound(equation: Equation, arrays: Iterable[Any]) -> list[Any]:
    try:
        with equation.ctx.manager:
            operands = zip(arrays, equation.invars, strict=True)
            return bound_wide(equation, [_as(widen(array), atom.aval) for array, atom in operands])
    except (
        AssertionError,
        NotImplementedError,
        TypeError,
        ValueError,
    ):  # the primitive takes no such operands
        raise _Unavailable from None
