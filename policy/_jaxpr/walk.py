"""The one walker that reads programs: every equation, wherever it stands."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import source_info_util

from policy._jaxpr.module_names import noted
from policy._jaxpr.origins import is_jax_file
from policy._jaxpr.paths import AUTOCAST, Path, path_of
from policy._jaxpr.primitives import COMBINES, KERNELS, REMATS
from policy._jaxpr.source_lines import layer_of, source_of
from policy._jaxpr.subprograms import opened
from policy.boundary import SCOPE_NAME as BOUNDARY
from policy.islands import ISLAND

_ON_DEVICES = frozenset(("shard_map",))


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """One equation, and where it stands.

    Attributes:
      equation: the equation of the jaxpr.
      path: the module path: names as rules use them; () outside of any module.
      is_backward: whether it is of the backward pass of a derivative.
      count: how often it runs, lengths of the scans around it multiplied. What is in the body of a `while` counts once,
        and so does what is in either branch of a `cond`.
      inside: the names of the primitives whose programs it stands in, outermost first.
      devices: on how many devices it runs as it stands: those of the `shard_map`s around it.
      axes: the sizes of the mesh axes that the `shard_map`s around it name.
      is_recomputed: whether it repeats, in the backward pass, what a checkpoint did not save.
      is_placed: whether this library put it there: a cast at a boundary, or one of autocast's.
      in_island: whether it stands in what `full_precision` keeps in float32.
      call: the equation that called the function of JAX's own that it stands in; None where it stands in none. JAX
        traces such a function once, and its equations point to the line of the first call.
      around: the place of the equation whose program it stands in; None at the top.
    """

    equation: Any
    path: Path
    is_backward: bool = False
    count: int = 1
    inside: tuple[str, ...] = ()
    devices: int = 1
    axes: tuple[tuple[str, int], ...] = ()
    is_recomputed: bool = False
    is_placed: bool = False
    in_island: bool = False
    call: Any = None
    around: Site | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.equation.primitive.name

    @property
    def source(self) -> str:
        """The line of the user's code, as ``model.py:12 (Net.__call__)``.

        Where no code of a user's called the module, its path and class, ``encoder/out (Dense)``; or "".
        """
        return self._line or layer_of(self.equation, self.path)

    @property
    def _line(self) -> str:
        if self.call is not None:
            return source_of(self.call)
        return source_of(self.equation) or ("" if self.around is None else self.around._line)


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A program that an equation runs.

    Attributes:
      jaxpr: open or closed.
      parameter: the name of the parameter that holds it.
      count: how often it runs each time that the equation does.
      devices: on how many devices at once.
    """

    jaxpr: Any
    parameter: str
    count: int = 1
    devices: int = 1


def walk(jaxpr: Any) -> Iterator[Site]:
    """Every equation of a program, open or closed, those of the programs inside it included, in order.

    An equation that holds a program comes before what it holds. The function that a sort, a scatter or a general
    reduction applies to two numbers is none of it, and what a kernel (`pallas_call`) holds neither.
    """
    return _walk(opened(jaxpr)[0], None)


def _walk(jaxpr: Any, around: Site | None) -> Iterator[Site]:
    for equation in jaxpr.eqns:
        site = site_of(equation, around)
        yield site
        for body in bodies_of(equation):
            yield from _walk(opened(body.jaxpr)[0], entered(site, body))


def site_of(equation: Any, around: Site | None) -> Site:
    """Returns the position of an equation. `around` is the result of `entered` for its body; None at the top."""
    stack = str(equation.source_info.name_stack)
    if around is not None and around.is_backward and equation.primitive.name in REMATS:
        stack = _once(stack)
    place = _place(stack, () if around is None else around.path, noted())
    if around is None:
        return Site(equation, place.path, place.is_backward, 1, (), 1, (), *place.marks)
    return Site(
        equation,
        place.path,
        place.is_backward or around.is_backward,
        around.count,
        around.inside,
        around.devices,
        around.axes,
        place.marks[0] or around.is_recomputed,
        place.marks[1] or around.is_placed,
        place.marks[2] or around.in_island,
        around.call,
        around,
    )


def _once(stack: str) -> str:
    """A name stack that JAX wrote twice over: that of a checkpoint in the backward pass of a scan."""
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
    marks = ("rematted_computation" in stack, BOUNDARY in stack or AUTOCAST in stack, ISLAND in stack)
    if BOUNDARY in stack or ISLAND in stack:
        path = tuple(name for name in path if name not in (BOUNDARY, ISLAND))
    return _Place(path, "transpose(" in stack, marks)


def entered(site: Site, body: Body) -> Site:
    """The place of a body: `site_of` reads where its equations stand from that."""
    is_of_jax = _is_of_jax(getattr(opened(body.jaxpr)[0], "debug_info", None))
    return dataclasses.replace(
        site,
        call=(site.equation if site.call is None else site.call) if is_of_jax else None,
        count=site.count * body.count,
        inside=(*site.inside, site.name),
        devices=site.devices * body.devices,
        axes=(*site.axes, *_axes(site.equation)) if site.name in _ON_DEVICES else site.axes,
    )


def _is_of_jax(debug_info: Any) -> bool:
    """Returns whether a program traces a function of JAX's own. `debug_info` reads "name at file:line" there."""
    _, at, place = str(getattr(debug_info, "func_src_info", "")).rpartition(" at ")
    return bool(at) and is_jax_file(place)


def bodies_of(equation: Any) -> Iterator[Body]:
    """The programs that an equation runs, one after the other or one of them."""
    name = equation.primitive.name
    if name in COMBINES or name in KERNELS:
        return
    count = equation.params.get("length", 1) if name == "scan" else 1
    devices = math.prod(size for _, size in _axes(equation)) if name in _ON_DEVICES else 1
    for parameter, value in equation.params.items():
        for program in _programs(value):
            yield Body(program, parameter, int(count) if isinstance(count, int) else 1, devices)


def _programs(value: Any) -> Iterator[Any]:
    for program in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(program, "eqns"):
            yield program


def _axes(equation: Any) -> tuple[tuple[str, int], ...]:
    """The axes along which a `shard_map` runs its body on each device for itself, and their sizes."""
    params = equation.params
    manual = params.get("manual_axes", params.get("axis_names"))
    sizes = dict(getattr(params.get("mesh"), "shape", {}) or {})
    return tuple((axis, int(size)) for axis, size in sizes.items() if not manual or axis in manual)


def written_at(equation: Any) -> str:
    """The innermost line outside of JAX that an equation comes from: tells apart the operations of a layer."""
    return source_info_util.summarize(equation.source_info)
