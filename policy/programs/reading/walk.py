"""The one walker that reads programs: every equation, wherever it stands."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import source_info_util

from policy.programs.jaxprs import Equation, OpenJaxpr, Subprogram, opened, subprograms
from policy.programs.marks import AUTOCAST, BOUNDARY, ISLAND
from policy.programs.paths import Path, noted, path_of
from policy.programs.primitives import REMATS
from policy.programs.reading.source_lines import is_jax_file, layer_of, source_of


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An equation and its position.

    Attributes:
      equation: the equation of the jaxpr.
      path: the module path: names as rules use them; () outside of any module.
      is_backward: whether it is of the backward pass of a derivative.
      count: how often it runs, lengths of the scans around it multiplied. Equations in the body of
        a `while` and in either branch of a `cond` count once.
      inside: the names of the primitives whose programs it stands in, outermost first.
      axes: the sizes of the mesh axes that the `shard_map`s around it name.
      is_recomputed: whether it repeats, in the backward pass, values that a checkpoint did not
        save.
      is_placed: whether this library put it there: a cast at a boundary, or one of autocast's.
      in_island: whether it stands in a part that `full_precision` keeps in float32.
      call: the equation that called the function of JAX's own that it stands in; None where it
        stands in none. JAX traces such a function once, and its equations point to the line of the
        first call.
      around: the place of the equation whose program it stands in; None at the top.
      program: of such a place, the program.
    """

    equation: Equation
    path: Path
    is_backward: bool = False
    count: int = 1
    inside: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    is_recomputed: bool = False
    is_placed: bool = False
    in_island: bool = False
    call: Any = None
    around: Site | None = dataclasses.field(default=None, repr=False, compare=False)
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.equation.primitive.name

    @property
    def devices(self) -> int:
        """The number of devices that it runs on as it stands."""
        return math.prod(size for _, size in self.axes)

    @property
    def source(self) -> str:
        """The line of the user's code, as ``model.py:12 (Net.__call__)``.

        Where no code of a user's called the module, its path and class, ``encoder/out (Dense)``; or
        "".
        """
        return self._line or layer_of(self.equation, self.path)

    @property
    def _line(self) -> str:
        if self.call is not None:
            return source_of(self.call)
        return source_of(self.equation) or ("" if self.around is None else self.around._line)


def walk(jaxpr: Any) -> Iterator[Site]:
    """Yields every equation of a program and of the programs inside it, in order, as a `Site`.

    An equation that holds a program comes before that program's equations. The function that a
    scatter or a general reduction applies to two numbers is left out, and so are kernels
    (`pallas_call`).

    Args:
      jaxpr: open or closed.
    """
    return _walk(opened(jaxpr)[0], None)


def _walk(jaxpr: OpenJaxpr, around: Site | None) -> Iterator[Site]:
    for equation in jaxpr.eqns:
        site = site_of(equation, around)
        yield site
        for one in subprograms(equation):
            if one.is_run:
                yield from _walk(one.body, entered(site, one))


def site_of(equation: Equation, around: Site | None) -> Site:
    """Returns the position of an equation. `around` is the result of `entered`.

    At the top, `around` is None.
    """
    stack = str(equation.source_info.name_stack)
    if around is not None and around.is_backward and equation.primitive.name in REMATS:
        stack = _once(stack)
    place = _place(stack, () if around is None else around.path, noted())
    if around is None:
        return Site(equation, place.path, place.is_backward, 1, (), (), *place.marks)
    inherited = around.is_recomputed, around.is_placed, around.in_island
    again, placed, island = map(operator.or_, place.marks, inherited)
    return Site(
        equation,
        place.path,
        place.is_backward or around.is_backward,
        *(around.count, around.inside, around.axes),
        *(again, placed, island),
        around.call,
        around,
    )


def _once(stack: str) -> str:
    """Returns a name stack without the repetition that JAX writes in a scan's backward pass.

    It repeats the stack of a checkpoint.
    """
    names = stack.split("/")
    half = len(names) // 2
    return "/".join(names[:half]) if half and names[:half] == names[half:] else stack


class _Place(NamedTuple):
    path: Path
    is_backward: bool
    marks: tuple[bool, bool, bool]


@functools.lru_cache(maxsize=8192)
def _place(stack: str, above: Path, _noted: int) -> _Place:
    path = path_of(stack, above) if stack else above
    is_placed = BOUNDARY in stack or AUTOCAST in stack
    marks = "rematted_computation" in stack, is_placed, ISLAND in stack
    if BOUNDARY in stack or ISLAND in stack:
        path = tuple(name for name in path if name not in (BOUNDARY, ISLAND))
    return _Place(path, "transpose(" in stack, marks)


def entered(site: Site, one: Subprogram) -> Site:
    """Returns the position of a program inside an equation, for `site_of` of its own equations."""
    is_of_jax = _is_of_jax(getattr(one.body, "debug_info", None))
    return dataclasses.replace(
        site,
        call=(site.equation if site.call is None else site.call) if is_of_jax else None,
        count=site.count * one.count,
        inside=(*site.inside, site.name),
        axes=(*site.axes, *one.axes),
        program=one.body,
    )


def _is_of_jax(debug_info: Any) -> bool:
    """Returns whether a program traces a function of JAX's own.

    `debug_info` reads "name at file:line" there.
    """
    _, at, place = str(getattr(debug_info, "func_src_info", "")).rpartition(" at ")
    return bool(at) and is_jax_file(place)


def written_at(equation: Equation) -> str:
    """Returns the innermost line outside of JAX that an equation comes from."""
    return source_info_util.summarize(equation.source_info)
