"""The one walker that reads programs: every equation, wherever it stands."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib

from policy.programs.jaxprs import Equation, OpenJaxpr, Subprogram, opened, subprograms
from policy.programs.marks import AUTOCAST, BOUNDARY, ISLAND
from policy.programs.paths import Path, noted, path_of
from policy.programs.primitives import REMATS

_JAX = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (jax, jaxlib)
)


@functools.lru_cache(maxsize=4096)
def is_jax_file(file: str) -> bool:
    """Returns whether a file belongs to JAX."""
    return file.startswith(_JAX) or file.startswith("<frozen")


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
    path, is_backward, marks = _place(stack, () if around is None else around.path, noted())
    if around is None:
        return Site(equation, path, is_backward, 1, (), (), *marks)
    inherited = around.is_recomputed, around.is_placed, around.in_island
    again, placed, island = map(operator.or_, marks, inherited)
    is_backward = is_backward or around.is_backward
    outer = around.count, around.inside, around.axes
    return Site(equation, path, is_backward, *outer, again, placed, island, around.call, around)


def _once(stack: str) -> str:
    """Returns a name stack without the repetition that JAX writes in a scan's backward pass.

    It repeats the stack of a checkpoint.
    """
    names = stack.split("/")
    half = len(names) // 2
    return "/".join(names[:half]) if half and names[:half] == names[half:] else stack


@functools.lru_cache(maxsize=8192)
def _place(stack: str, above: Path, _noted: int) -> tuple[Path, bool, tuple[bool, bool, bool]]:
    """Returns a path, whether it is of the backward pass, and the three marks of a `Site`."""
    path = path_of(stack, above) if stack else above
    is_placed = BOUNDARY in stack or AUTOCAST in stack
    marks = "rematted_computation" in stack, is_placed, ISLAND in stack
    if BOUNDARY in stack or ISLAND in stack:
        path = tuple(name for name in path if name not in (BOUNDARY, ISLAND))
    return path, "transpose(" in stack, marks


def entered(site: Site, one: Subprogram) -> Site:
    """Returns the position of a program inside an equation, for `site_of` of its own equations."""
    # It reads "name at file:line" for a traced function.
    info = getattr(getattr(one.body, "debug_info", None), "func_src_info", "")
    _, at, file = str(info).rpartition(" at ")
    call = site.equation if site.call is None else site.call
    return dataclasses.replace(
        site,
        call=call if at and is_jax_file(file) else None,
        count=site.count * one.count,
        inside=(*site.inside, site.name),
        axes=(*site.axes, *one.axes),
        program=one.body,
    )
