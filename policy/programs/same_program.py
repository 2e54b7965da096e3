"""Compares two programs up to their first difference."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.programs.paths import Path, path_of, spelled
from policy.programs.protocols import Equation
from policy.programs.source_lines import source_of
from policy.programs.subprograms import is_jaxpr, opened

# Parameters that name an equation's origin or function, and change nothing that it computes.
_NAMES = frozenset(("name", "debug_info", "fun_name", "ctx_mesh"))
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of two programs.

    Attributes:
      what: a sentence that describes the difference.
      path: the module path in the first program, or in the second where the first has ended.
      sources: the lines of the user's code in both programs; "" if there is none.
    """

    what: str
    path: str = ""
    sources: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        where = f" at '{self.path}'" if self.path else ""
        first, second = (source or "unknown" for source in self.sources)
        lines = f" Source lines: {first} and {second}." if any(self.sources) else ""
        return f"{self.what[:-1]}{where}.{lines}"


def first_difference(first: Any, second: Any) -> Difference | None:
    """Returns the first difference of two jaxprs, closed or open, or None.

    Two jaxprs are the same program if they take arrays of the same shapes and dtypes, run the same
    operations with the same parameters on the same values in the same order, and return the same
    values. Names and source lines are ignored. Constants are compared by value. For a custom
    derivative, the function is compared, but not its rule.
    """
    return next(_differences(first, second, {}, ()), None)


def _differences(
    first: Any, second: Any, same: dict[Any, Any], above: Path
) -> Iterator[Difference]:
    """Yields the differences of two programs.

    `same` maps variables of the first program to those of the second.
    """
    (one, one_consts), (two, two_consts) = opened(first), opened(second)
    yield from _arguments(one, two)
    yield from _constants(one_consts, two_consts)
    same = same | dict(
        zip((*one.constvars, *one.invars), (*two.constvars, *two.invars), strict=True)
    )
    for i, (a, b) in enumerate(zip(one.eqns, two.eqns, strict=False)):
        yield from _at(_equation(a, b, same, above), i, a, b, above)
        same |= dict(zip(a.outvars, b.outvars, strict=True))
    if len(one.eqns) != len(two.eqns):
        longer, which = (one, "first") if len(one.eqns) > len(two.eqns) else (two, "second")
        i = min(len(one.eqns), len(two.eqns))
        extra = longer.eqns[i]
        source = source_of(extra)
        yield Difference(
            f"The {which} program continues after equation {i}, with {_text(extra)}.",
            _path(extra, above),
            (source, "") if which == "first" else ("", source),
        )
    if len(one.outvars) != len(two.outvars):
        yield Difference(f"They return {len(one.outvars)} and {len(two.outvars)} arrays.")
    for i, (a, b) in enumerate(zip(one.outvars, two.outvars, strict=True)):
        if not _is_same(a, b, same):
            yield Difference(
                f"They return different values at position {i}: {_atom(a)} and {_atom(b)}."
            )


def _arguments(one: Any, two: Any) -> Iterator[Difference]:
    ours, theirs = ([_aval(v.aval) for v in (*p.constvars, *p.invars)] for p in (one, two))
    if ours != theirs:
        yield Difference(
            f"They take different arguments: {', '.join(ours)} and {', '.join(theirs)}."
        )


def _constants(ours: list[Any], theirs: list[Any]) -> Iterator[Difference]:
    for i, (a, b) in enumerate(
        zip(ours, theirs, strict=True)
    ):  # the same number, as they are among the arguments
        if not _equal(a, b):
            yield Difference(
                f"They close over different constants: the values of constant {i} differ."
            )


def _at(found: Iterator[Any], i: int, a: Any, b: Any, above: Path) -> Iterator[Difference]:
    """Yields the differences found in a pair of equations, with their place."""
    for what in found:
        if isinstance(what, Difference):  # of the programs inside of them
            yield (
                what
                if what.path or any(what.sources)
                else dataclasses.replace(what, path=_path(a, above))
            )
        else:
            yield Difference(f"Equation {i} {what}.", _path(a, above), (source_of(a), source_of(b)))


def _equation(a: Any, b: Any, same: dict[Any, Any], above: Path) -> Iterator[Any]:
    if a.primitive.name != b.primitive.name:
        yield f"is {_text(a)} in the first and {_text(b)} in the second"
    for i, (x, y) in enumerate(zip(a.invars, b.invars, strict=False)):
        if _aval(x.aval) != _aval(y.aval):
            yield f"of {a.primitive.name} has different operands: {_text(a)} and {_text(b)}"
        if not _is_same(x, y, same):
            yield (
                f"of {a.primitive.name} takes different values as operand {i}: "
                f"{_atom(x)} and {_atom(y)}"
            )
    if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
        yield (
            f"of {a.primitive.name} has {len(a.invars)} and {len(b.invars)} operands, and "
            f"{len(a.outvars)} and {len(b.outvars)} results"
        )
    for name in sorted({*a.params, *b.params} - _NAMES):
        yield from _parameter(
            a.primitive.name, name, a.params.get(name), b.params.get(name), _path_of(a, above)
        )
    if [_aval(v.aval) for v in a.outvars] != [_aval(v.aval) for v in b.outvars]:
        yield f"has different results: {_text(a)} and {_text(b)}"


def _parameter(primitive: str, name: str, a: Any, b: Any, path: Path) -> Iterator[Any]:
    ours, theirs = (
        list(value) if isinstance(value, (tuple, list)) else [value] for value in (a, b)
    )
    if len(ours) == len(theirs) and any(map(is_jaxpr, ours)):
        for one, two in zip(ours, theirs, strict=True):
            if is_jaxpr(one) and is_jaxpr(two):
                yield from _differences(one, two, {}, path)
    elif not _equal(a, b):
        yield f"of {primitive} has {name}={_shortened(a)} and {name}={_shortened(b)}"


def _equal(a: Any, b: Any) -> bool:
    if callable(a) and callable(b) and not isinstance(a, type):
        return True  # a rule or a thunk, made anew by each trace
    if isinstance(a, (jax.Array, np.ndarray)) or isinstance(b, (jax.Array, np.ndarray)):
        return _equal_arrays(a, b)
    try:
        if bool(a == b):
            return True
    except (TypeError, ValueError):
        pass
    return type(a) is type(b) and _shortened(a, None) == _shortened(b, None)


def _equal_arrays(a: Any, b: Any) -> bool:
    if any(not hasattr(x, "dtype") for x in (a, b)) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _is_same(a: Any, b: Any, same: dict[Any, Any]) -> bool:
    if hasattr(a, "val") or hasattr(b, "val"):
        return hasattr(a, "val") and hasattr(b, "val") and _equal_literals(a, b)
    return same.get(a) is b


def _equal_literals(a: Any, b: Any) -> bool:
    return (
        _aval(a.aval) == _aval(b.aval)
        and np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()
    )


def _path_of(equation: Equation, above: Path) -> Path:
    return path_of(str(equation.source_info.name_stack), above)


def _path(equation: Equation, above: Path) -> str:
    return spelled(_path_of(equation, above))


def _aval(aval: Any) -> str:
    weak = ", weak" if getattr(aval, "weak_type", False) else ""
    dtype = getattr(aval, "dtype", None)
    return f"{aval}" if dtype is None else f"{dtype}[{','.join(map(str, aval.shape))}{weak}]"


def _atom(atom: Any) -> str:
    return f"the number {atom.val}" if hasattr(atom, "val") else f"a {_aval(atom.aval)}"


def _text(equation: Equation) -> str:
    operands, results = (
        ", ".join(_aval(v.aval) for v in vs) for vs in (equation.invars, equation.outvars)
    )
    return f"{equation.primitive.name}({operands}) -> {results}"


def _shortened(value: Any, limit: int | None = 120) -> str:
    text = _ADDRESS.sub("", repr(value))
    return text if limit is None or len(text) <= limit else text[:limit] + "…"
