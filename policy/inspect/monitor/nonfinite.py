"""The first operation of a step that makes infinities or NaN of finite numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.monitor.tensor_statistics import bits_of
from policy.programs.jaxprs import Equation
from policy.programs.primitives import EXACT, MOVES_DATA
from policy.programs.rewriting.upcast import dtype_of

FINITE, INFINITE, NAN = 0, 1, 2
_LAST = 2**24  # more than operations; float32 has all whole numbers up to it
_EXACT = (EXACT | MOVES_DATA) - {"select_n", "scatter", "clamp", "max", "min"}


class Operation(NamedTuple):
    """An equation that may make infinities or NaN.

    Attributes: those of `first` in a record.
    """

    path: str
    direction: str
    operation: str
    line: str


class Flag(NamedTuple):
    """An operation in a run.

    Attributes:
      number: the place of the operation in program order.
      is_made: () bool, whether it made infinities of finite numbers, or NaN of others.
    """

    number: int
    is_made: Any


def code_of(array: Any) -> Any:
    """Returns `FINITE`, `INFINITE` or `NAN`: the worst number of an array, () int32.

    That of a constant is a number.
    """
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return FINITE
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.max(*(jnp.int32(code_of(part)) for part in (lax.real(array), lax.imag(array))))
    if not isinstance(array, jax.core.Tracer):
        wide = np.asarray(array).astype(np.float64)
        return NAN if np.isnan(wide).any() else INFINITE if np.isinf(wide).any() else FINITE
    bits = bits_of(array)
    worst = jnp.max(bits.numbers, initial=0)
    infinite = bits.of(np.inf)
    return (worst >= infinite).astype(jnp.int32) + (worst > infinite).astype(jnp.int32)


def worst_of(codes: Iterable[Any]) -> Any:
    """Returns the largest of some codes."""
    found = list(codes)
    fixed = max((code for code in found if isinstance(code, int)), default=FINITE)
    traced = [code for code in found if not isinstance(code, int)]
    if not traced or fixed == NAN:
        return fixed
    worst = traced[0]
    for code in traced[1:]:
        worst = lax.max(worst, code)
    return lax.max(worst, jnp.int32(fixed)) if fixed else worst


def keeps_finite(equation: Equation) -> bool:
    """Returns whether the results of an equation are as finite as its operands."""
    name = equation.primitive.name
    if name == "convert_element_type":
        before, after = dtype_of(equation.invars[0]), dtype_of(equation.outvars[0])
        if not jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact):
            return True
        return float(jnp.finfo(after).max) >= float(jnp.finfo(before).max)
    return name in _EXACT or name == "sharding_constraint"


def first_made(flags: Sequence[Flag], axes: Mapping[str, int]) -> jax.Array:
    """Returns the first operation whose flag is set, as a number that is larger for earlier ones.

    It is int32, 0 for none, of each device of some mesh axes: (devices,).
    """
    numbers = jnp.array([_LAST - flag.number for flag in flags], jnp.int32)
    is_made = jnp.stack([jnp.asarray(flag.is_made) for flag in flags])
    first = jnp.max(jnp.where(is_made, numbers, 0), initial=0)
    if not axes:
        return first[None]
    names, count = tuple(axes), int(np.prod(list(axes.values())))
    return lax.psum(jnp.where(jnp.arange(count) == lax.axis_index(names), first, 0), names)


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
