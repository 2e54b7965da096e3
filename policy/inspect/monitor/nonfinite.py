"""The operations of a step that make infinities or NaN of finite numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.traced.upcast import dtype_of
from policy.programs import primitives
from policy.programs.jaxprs import Equation

_LAST = 2**22 - 1  # more than operations; float32 has all whole numbers up to 2**24
_FRESH = 2**23
_MOST = 4  # operations that each program inside a step reports

# Sums and products that overflow keep finite here: then a later operation is named.
_KEEPS = (
    (primitives.ELEMENTWISE | primitives.EXACT | primitives.MOVES_DATA)
    - primitives.MAKES_NONFINITE
    - {"select_n"}
)


class Flag(NamedTuple):
    """An operation in a run.

    Attributes:
      number: the place of the operation in program order.
      results: the codes of its results, by their places in `FinitenessCodes`.
      operands: those of its operands.
    """

    number: int
    results: Collection[int]
    operands: Collection[int]


class FinitenessCodes:
    """Codes of some arrays of one program: 1 for those with infinities, 2 for those with NaN.

    A code is a set of places, of the arrays that a value was computed from by operations that make
    no infinities.
    """

    def __init__(self) -> None:
        self._found: list[Any] = []

    def of(self, array: Any) -> frozenset[int]:
        """Returns the code of an array. That of a finite constant is empty."""
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return frozenset()
        if not isinstance(array, jax.core.Tracer):
            if not is_infinite_constant(array):
                return frozenset()
            array = jnp.asarray(array)
        if dtype.itemsize == 1:
            array = array.astype(jnp.float32)
        has_nan, is_finite = jnp.isnan(array).any(), jnp.isfinite(array).all()
        self._found.append((~is_finite).astype(jnp.int32) + has_nan.astype(jnp.int32))
        return frozenset((len(self._found) - 1,))

    def worst(self, places: Sequence[Collection[int]]) -> jax.Array:
        """Returns the largest code of each of some sets of places, (sets,) int32."""
        table = np.full((len(places), max(1, *map(len, places))), len(self._found))
        for row, of in zip(table, places, strict=True):
            row[: len(of)] = sorted(of)
        return jnp.max(jnp.stack([*self._found, jnp.int32(0)])[table], axis=1)


def keeps_finite(equation: Equation) -> bool:
    """Returns whether the results of an equation are taken to be as finite as its operands."""
    name = equation.primitive.name
    after = dtype_of(equation.outvars[0])
    if name == "convert_element_type":
        before = dtype_of(equation.invars[0])
        if not jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact):
            return True
        return float(jnp.finfo(after).max) >= float(jnp.finfo(before).max)
    if name in primitives.MOVES_DATA | primitives.EXACT:
        return name != "select_n"
    is_wide = after is None or after == jnp.bfloat16 or after.itemsize >= 4
    return is_wide and name in _KEEPS


def is_infinite_constant(array: Any) -> bool:
    """Returns whether an array is a constant of the program with infinities or NaN."""
    dtype = getattr(array, "dtype", None)
    if isinstance(array, jax.core.Tracer) or dtype is None:
        return False
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return not np.isfinite(np.asarray(array).astype(np.complex128)).all()


def first_made(flags: Sequence[Flag], codes: FinitenessCodes) -> jax.Array:
    """Returns the first operations that make infinities of finite numbers, or NaN of others.

    They are numbers that are larger for earlier operations, and for those with finite operands;
    odd for NaN; 0 for none; int32 (operations,).
    """
    numbers = np.array([2 * (_LAST - flag.number) for flag in flags], np.int32)
    after = codes.worst([flag.results for flag in flags])
    before = codes.worst([flag.operands for flag in flags])
    numbers = numbers + after // 2 + jnp.where(before == 0, _FRESH, 0)
    return lax.top_k(jnp.where(after > before, numbers, 0), min(_MOST, len(flags)))[0]


class MadeOperation(NamedTuple):
    """An operation that made infinities or NaN.

    Attributes:
      order: sorts operations: those with finite operands first, then by program order.
      number: its place in program order.
      is_nan: whether it made NaN.
      layer: the step of the scans over layers around it, or None.
    """

    order: int
    number: int
    is_nan: bool
    layer: int | None

    @property
    def is_fresh(self) -> bool:
        """True if the operands of the operation were finite."""
        return -self.order >= _FRESH


class Scan(NamedTuple):
    """A scan around a program inside a step.

    Attributes:
      is_layers: whether its steps are layers; those of microbatches are not.
      is_reverse: whether it runs from the last step to the first.
    """

    is_layers: bool
    is_reverse: bool


def operations_made(found: np.ndarray, scans: Sequence[Scan]) -> Iterator[MadeOperation]:
    """Yields the operations of the first step of some scans that has any.

    Args:
      found: the results of `first_made`, (*steps, operations).
      scans: the scans, outermost first.
    """
    backward = tuple(axis for axis, scan in enumerate(scans) if scan.is_reverse)
    by_step = np.flip(found.astype(int), backward)
    some = np.argwhere(by_step.any(-1))
    if not len(some):
        return
    place, layer = tuple(some[0]), None
    for step, length, scan in zip(place, by_step.shape, scans, strict=False):
        if scan.is_layers:
            layer = int(length - 1 - step if scan.is_reverse else step) + length * (layer or 0)
    for code in sorted({*by_step[place].ravel().tolist()} - {0}, reverse=True):
        yield MadeOperation(-code, _LAST - code % _FRESH // 2, bool(code % 2), layer)
