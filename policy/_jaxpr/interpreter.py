"""Runs a program again, equation by equation, with values of another kind than the ones it was traced with."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util

from policy._jaxpr.paths import Path, path_of
from policy.boundary import SCOPE_NAME as BOUNDARY
from policy.islands import ISLAND

_SCOPES = frozenset((BOUNDARY, ISLAND))  # of ours: no modules
Chain = tuple[int, ...]  # the `id`s of the equations that a program stands in, outermost first
Notes = dict[int, Any]  # what a run reports of its values, beside its outputs


class Place(NamedTuple):
    """A module path, and the pass that an equation of it belongs to: what a checkpoint computes again is "again"."""

    path: Path = ()
    direction: Literal["forward", "backward", "again"] = "forward"


class Value:
    """One value of the traced program, as it is run.

    Attributes:
      arrays: its numbers, once for each lane that computes its own; a lane without one reads the first's.
      origin: where it was computed; what that means is the run's affair.
    """

    __slots__ = ("arrays", "origin")

    def __init__(self, arrays: Sequence[Any], origin: Any = None):
        self.arrays, self.origin = tuple(arrays), origin


class Lane(Protocol):
    """The float32 values of what is not the widened program: see `policy.compare.float32_values`."""

    def enter(self, chain: Chain, jaxpr: Any, args: Sequence[Value]) -> None: ...
    def given(self, chain: Chain, equation: Any) -> Iterable[tuple[int, Any]]: ...
    def made(self, chain: Chain, equation: Any, outputs: Sequence[Value]) -> Iterable[tuple[int, Any]]: ...
    def keep(self, chain: Chain, equation: Any, outputs: Sequence[Value]) -> None: ...
    def outputs(self, values: Sequence[Value]) -> Iterable[tuple[int, Any]]: ...
    def within(self, body: Literal["open", "checkpoint", "closed"]) -> Lane: ...


class Rerun(abc.ABC):
    """One run of a program, which may hold programs. A subclass says what happens to an equation that holds none.

    Attributes:
      place: that of the equation whose body is being run.
      bodies: the programs inside equations that this one stands in, outermost first.
      axes: the mesh axes that each device runs by itself over.
      notes: what was noted so far in the program that is being traced.
      chain: the equations that this program stands in.
      lane: what float32 computes instead, where that is another program; None where it is this one, widened.
    """

    def __init__(self) -> None:
        self.place = Place()
        self.axes: tuple[str, ...] = ()
        self.bodies: tuple[object, ...] = ()
        self.notes: Notes = {}
        self.chain: Chain = ()
        self.lane: Lane | None = None

    # What a subclass says ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def equation(self, equation: Any, values: list[Value]) -> list[Value]:
        """The outputs of an equation."""

    @abc.abstractmethod
    def copied(self) -> Rerun:
        """Another run of the same kind, in the same place."""

    def carried(self, equation: Any, values: Sequence[Value], places: Sequence[int]) -> list[Value]:
        """The values that a loop starts with, of as many arrays as they have after every step.

        `values` are all that the loop's body reads, `places` say which of them are carried.
        """
        return [values[place] for place in places]

    def entering(self, values: Sequence[Value]) -> list[Value]:
        """New values in a loop's body: what is carried there, and what is scanned over."""
        return [Value(value.arrays) for value in values]

    def settled(self, value: Value, like: Value) -> Value:
        """`value`, of as many arrays as `like` has."""
        return value

    def kinds(self, equation: Any, values: Sequence[Value]) -> list[Value]:
        """Values of as many arrays as the outputs of an equation are to have."""
        return [Value([None]) for _ in equation.outvars]

    def into(self, values: Sequence[Value]) -> list[Value]:
        """The same values, as a body of its own reads them."""
        return list(values)

    def replaced(self, place: Place, value: Value, array: Any) -> Value:
        """A value that is computed or read at a place, and that is `array` in float32."""
        return value

    def finished(self, values: Sequence[Value], atoms: Sequence[Any]) -> None:
        """Told of what a body of its own hands back."""
        return  # most have nothing to note

    # The run ----------------------------------------------------------------------------------------------------------

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """The outputs of an open jaxpr."""
        if self.lane is not None:
            self.lane.enter(self.chain, jaxpr, args)
        values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Value:
            if not isinstance(atom, jex_core.Literal):
                return values[atom]
            dtype = getattr(atom.aval, "dtype", None)
            return Value([atom.val if dtype is None else np.asarray(atom.val, dtype)])

        last = _last_reads(jaxpr)
        for i, equation in enumerate(jaxpr.eqns):
            info = equation.source_info
            name_stack = source_info_util.current_name_stack() + info.name_stack
            with source_info_util.user_context(info.traceback, name_stack=name_stack), equation.ctx.manager:
                given = self.given(equation, [read(atom) for atom in equation.invars])
                outputs = self._made(equation, self.equation(equation, given))
            values.update(zip(equation.outvars, outputs, strict=True))
            for variable in last.get(i, ()):
                values.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars]

    def place_of(self, equation: Any) -> Place:
        """Returns the position of an equation."""
        name_stack = str(equation.source_info.name_stack)
        is_again = "rematted_computation" in name_stack
        is_backward = "transpose(" in name_stack or self.place.direction == "backward"
        path = module_path(path_of(name_stack, self.place.path), is_backward)
        return Place(path, "again" if is_again else "backward" if is_backward else self.place.direction)

    def inside(self, equation: Any) -> Rerun:
        """The run of an equation's body, which is part of the program that is being traced."""
        inner = self.copied().standing_in(self)
        inner.place, inner.chain, inner.notes = self.place_of(equation), (*self.chain, id(equation)), self.notes
        return inner

    def standing_in(self, outer: Rerun) -> Rerun:
        """This run, in the place of another."""
        self.place, self.axes, self.bodies = outer.place, outer.axes, outer.bodies
        self.chain, self.lane = outer.chain, outer.lane
        return self

    # What float32 computes in another way -----------------------------------------------------------------------------

    def given(self, equation: Any, values: list[Value]) -> list[Value]:
        for k, array in () if self.lane is None else self.lane.given(self.chain, equation):
            values[k] = self.replaced(self.place_of(equation), values[k], array)
        return values

    def _made(self, equation: Any, outputs: list[Value]) -> list[Value]:
        if self.lane is None:
            return outputs
        for i, array in self.lane.made(self.chain, equation, outputs):
            outputs[i] = self.replaced(self.place_of(equation), outputs[i], array)
        self.lane.keep(self.chain, equation, outputs)
        return outputs

    def ended(self, values: Sequence[Value]) -> list[Value]:
        """Returns the outputs of the whole program, with float32's own values."""
        values = list(values)
        for k, array in () if self.lane is None else self.lane.outputs(values):
            values[k] = self.replaced(self.place, values[k], array)
        return values


def module_path(path: Path, is_backward: bool) -> Path:
    """A path without scopes that are no modules.

    The transposition of checkpoints and derivative rules writes part of the path of their equations twice: Net/Net for
    Net, layers/norm/layers/norm for layers/norm.
    """
    path = tuple(name for name in path if name not in _SCOPES)
    return _once(path) if is_backward else path


@functools.lru_cache(maxsize=4096)
def _once(path: Path) -> Path:
    for length in range(len(path) // 2, 0, -1):
        for start in range(len(path) - 2 * length + 1):
            middle, end = start + length, start + 2 * length
            if path[start:middle] == path[middle:end] and not all(map(str.isdigit, path[start:middle])):
                return _once((*path[:middle], *path[end:]))
    return path


def lost_prefixes(paths: Iterable[Path]) -> dict[Path, Path]:
    """The paths whose beginning was lost, and what they are.

    JAX hoists what every step of a differentiated scan computes alike out of it, and then names it by the path within
    the body alone: such a path is the end of one other.
    """
    every = set(paths)
    ends: dict[Path, list[Path]] = {}
    for path in every:
        for start in range(1, len(path)):
            ends.setdefault(path[start:], []).append(path)
    return {end: found[0] for end, found in ends.items() if end in every and len(found) == 1}


def _last_reads(jaxpr: Any) -> dict[int, list[Any]]:
    """The variables that no equation after this one reads: XLA frees what we don't hold, where nothing is jitted."""
    kept = {atom for atom in jaxpr.outvars if not isinstance(atom, jex_core.Literal)}
    last: dict[Any, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        last.update((atom, i) for atom in equation.invars if not isinstance(atom, jex_core.Literal))
    found: dict[int, list[Any]] = {}
    for variable, i in last.items():
        if variable not in kept:
            found.setdefault(i, []).append(variable)
    return found


def flat(values: Sequence[Value]) -> list[Any]:
    """All arrays of some values."""
    return [array for value in values for array in value.arrays]


def filled(values: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """The same values with other arrays."""
    rest = iter(arrays)
    return [Value([next(rest) for _ in value.arrays], value.origin) for value in values]


Handler = Callable[[Rerun, Any, list[Value]], list[Value]]
HANDLERS: dict[str, Handler] = {}


def handler_of(equation: Any) -> Handler | None:
    """Returns the runner of an equation's programs; None where it holds none, or some for other platforms."""
    is_for_platforms = equation.params.get("branches_platforms") is not None
    return None if is_for_platforms else HANDLERS.get(equation.primitive.name)
