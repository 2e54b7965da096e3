"""The differences of a program in half precision from a float32 trace of the same function."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from policy.programs.dtypes import F32, is_half
from policy.programs.jaxprs import Equation, constants_within
from policy.programs.paths import Path
from policy.programs.reading.walk import Site, walk, written_at
from policy.programs.rewriting.placed_interpreter import Reference, module_path
from policy.programs.rewriting.upcast import dtype_of, keeps


def reference_of(half: Any, wide: Any = None) -> Reference:
    """Returns the differences of a program from a float32 trace of the same function.

    The equations of both are aligned by name, module and shape, in program order. A constant of
    the float32 trace is that of the program if it rounds to it, or if both stand in the same line.

    Args:
      half, wide: the jaxprs. `wide` is None if the function has no float32 trace.
    """
    sites = list(walk(half))
    others = [] if wide is None else list(walk(wide))
    counterparts = _aligned(sites, others)
    known = constants_within(half)
    known_wide = {} if wide is None else constants_within(wide)
    constants: dict[int, dict[int, np.ndarray]] = {}
    unpaired: dict[Path, None] = {}
    for site in sites:
        other = counterparts.get(id(site.equation))
        for k, rounded in _half_constants(site.equation, known):
            found = None if other is None else _value(other.invars[k], known_wide)
            if found is not None and _is_one(rounded, found, site.equation, other):
                constants.setdefault(id(site.equation), {})[k] = np.asarray(found, F32)
            elif _has_many_digits(rounded):
                unpaired[module_path(site.path, site.is_backward)] = None
    return Reference(constants, _exact(sites), tuple(unpaired))


def _aligned(half: Iterable[Site], wide: Iterable[Site]) -> dict[int, Equation]:
    """Returns the counterpart of each equation of a program, by its `id`."""
    sides = [
        [site for site in side if site.name != "convert_element_type"] for side in (half, wide)
    ]
    kinds = [list(map(_kind, side)) for side in sides]
    matcher = difflib.SequenceMatcher(None, *kinds, autojunk=False)
    return {
        id(sides[0][i + n].equation): sides[1][k + n].equation
        for i, k, size in matcher.get_matching_blocks()
        for n in range(size)
    }


def _kind(site: Site) -> tuple[Any, ...]:
    """Returns a key that an equation shares with its counterpart in another trace."""
    shapes = tuple(getattr(v.aval, "shape", None) for v in site.equation.outvars)
    count = len(site.equation.invars)
    return site.name, site.path, site.is_backward, site.is_recomputed, count, shapes


def _value(atom: Any, known: Mapping[Any, Any]) -> Any:
    return np.asarray(atom.val) if isinstance(atom, jex_core.Literal) else known.get(atom)


def _half_constants(
    equation: Equation, known: Mapping[Any, Any]
) -> Iterator[tuple[int, np.ndarray]]:
    for k, atom in enumerate(equation.invars):
        dtype = dtype_of(atom)
        if dtype is not None and is_half(dtype):
            value = _value(atom, known)
            if value is not None:
                yield k, np.asarray(value, dtype)


def _is_one(rounded: np.ndarray, found: Any, equation: Equation, other: Any) -> bool:
    """Returns whether a constant of the float32 trace is one of the program before rounding."""
    if np.shape(found) != rounded.shape or is_half(found.dtype):
        return False
    with np.errstate(over="ignore"):
        again = np.asarray(found).astype(rounded.dtype)
    return np.array_equal(again, rounded, equal_nan=True) or (
        written_at(equation) == written_at(other)
    )


def _has_many_digits(rounded: np.ndarray) -> bool:
    """Returns whether numbers may have been rounded: short ones, as 2 and 0.5, are exact."""
    kept = jnp.finfo(rounded.dtype).nmant // 2
    mantissa = np.frexp(rounded.astype(np.float64))[0] * 2.0 ** (kept + 1)
    finite = mantissa[np.isfinite(mantissa)]
    return bool((finite != np.round(finite)).any())


def _exact(sites: Iterable[Site]) -> frozenset[int]:
    made = {variable: site.equation for site in sites for variable in site.equation.outvars}
    found = set[int]()
    for site in sites:
        if site.name != "reduce_precision":
            continue
        maker = made.get(site.equation.invars[0])
        if maker is None or maker.primitive.name != "convert_element_type":
            continue
        dtype = dtype_of(maker.invars[0])
        if is_half(dtype) and keeps(site.equation, dtype):
            found.add(id(site.equation))
    return frozenset(found)
