"""The first operation of a step that makes infinities or NaN of finite numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.traced.upcast import dtype_of
from policy.programs import primitives
from policy.programs.jaxprs import Equation

_LAST = 2**24  # more than operations; float32 has all whole numbers up to it

# Sums and products that overflow keep finite here: then a later operation is named.
_KEEPS = (
    (primitives.ELEMENTWISE | primitives.EXACT | primitives.MOVES_DATA)
    - primitives.MAKES_NONFINITE
    - {"select_n"}
)


class StepOperation(NamedTuple):
    """An equation that may make infinities or NaN.

    Attributes: those of `first` in a record.
    """

    path: str
    direction: str
    operation: str
    line: str
    dtype: str


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
        self._worst: list[Any] = []  # the largest bits of each array, unsigned
        self._infinite: list[int] = []  # those of infinity

    def of(self, array: Any) -> frozenset[int]:
        """Returns the code of an array. That of a finite constant is empty."""
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return frozenset()
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return self.of(lax.real(array)) | self.of(lax.imag(array))
        if not isinstance(array, jax.core.Tracer):
            if np.isfinite(np.asarray(array).astype(np.float64)).all():
                return frozenset()
            array = jnp.asarray(array)
        if dtype not in _BITS:
            array = array.astype(jnp.float32)
        unsigned = _BITS[array.dtype]
        bits = lax.bitcast_convert_type(array, unsigned) & unsigned(jnp.iinfo(unsigned).max // 2)
        self._worst.append(lax.reduce_max(bits, tuple(range(bits.ndim))))
        self._infinite.append(int(np.asarray(np.inf, array.dtype).view(unsigned)))
        return frozenset((len(self._worst) - 1,))

    def numbers(self) -> jax.Array:
        """Returns 0, 1 or 2 for each place, and a 0 at last, int32."""
        found: list[Any] = [jnp.zeros(1, jnp.int32)]
        order = [len(self._worst)]
        for unsigned in dict.fromkeys(worst.dtype for worst in self._worst):
            places = [i for i, worst in enumerate(self._worst) if worst.dtype == unsigned]
            worst = jnp.stack([self._worst[i] for i in places])
            infinite = np.array([self._infinite[i] for i in places], unsigned)
            found.append(sum(x.astype(jnp.int32) for x in (worst >= infinite, worst > infinite)))
            order += places
        return jnp.concatenate(found)[np.argsort(order)]


_BITS = {
    np.dtype(jnp.float32): np.uint32,
    np.dtype(jnp.bfloat16): np.uint16,
    np.dtype(jnp.float16): np.uint16,
    np.dtype(jnp.float64): np.uint64,
}


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


def first_made(flags: Sequence[Flag], codes: FinitenessCodes, axes: Mapping[str, int]) -> jax.Array:
    """Returns the first operation that makes infinities of finite numbers, or NaN of others.

    It is a number that is larger for earlier ones, 0 for none, int32, of each device of some mesh
    axes: (devices,).
    """
    numbers = np.array([_LAST - flag.number for flag in flags], np.int32)
    after = worst(codes, [flag.results for flag in flags])
    before = worst(codes, [flag.operands for flag in flags])
    first = jnp.max(jnp.where(after > before, numbers, np.int32(0)))
    if not axes:
        return first[None]
    names, count = tuple(axes), math.prod(axes.values())
    return lax.psum(jnp.where(jnp.arange(count) == lax.axis_index(names), first, 0), names)


def worst(codes: FinitenessCodes, places: Sequence[Collection[int]]) -> jax.Array:
    """Returns the largest number of each of some codes, (codes,) int32."""
    table = np.full((len(places), max(1, *map(len, places))), -1)  # the place of a 0
    for row, of in zip(table, places, strict=True):
        row[: len(of)] = sorted(of)
    return jnp.max(codes.numbers()[table], axis=1)


@dataclasses.dataclass(frozen=True)
class FirstSpan:
    """The results of `first_made` in a program inside a step.

    Attributes:
      start: the place of the first among the numbers of a snapshot.
      steps: lengths of the scans around the program, outermost first.
      is_layers: for each, whether its steps are layers.
      is_reverse: for each, whether it runs from the last step to the first.
      devices: of the mesh axes.
    """

    start: int
    steps: tuple[int, ...]
    is_layers: tuple[bool, ...]
    is_reverse: tuple[bool, ...]
    devices: int

    def found(self, numbers: np.ndarray) -> tuple[int, int | None, list[int] | None] | None:
        """Returns the number of the first operation, its layer and its devices; None if there is
        none.
        """
        stop = self.start + int(np.prod(self.steps)) * self.devices
        found = numbers[self.start : stop].astype(int).reshape(*self.steps, self.devices)
        backward = tuple(axis for axis, is_one in enumerate(self.is_reverse) if is_one)
        by_step = np.flip(found, backward).reshape(-1, self.devices)
        steps = np.flatnonzero(by_step.max(1))
        if not steps.size:
            return None
        place = np.unravel_index(steps[0], self.steps) if self.steps else ()
        largest = by_step[steps[0]].max()
        devices = np.flatnonzero(by_step[steps[0]] == largest)
        layer = None
        for step, length, is_layer, is_one in zip(
            place, self.steps, self.is_layers, self.is_reverse, strict=True
        ):
            if is_layer:
                step = length - 1 - step if is_one else step
                layer = int(step) + length * (layer or 0)
        return _LAST - int(largest), layer, devices.tolist() if self.devices > 1 else None
