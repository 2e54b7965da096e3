"""Compares two programs up to their first difference."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.programs.jaxprs import Equation, is_jaxpr, opened
from policy.programs.paths import Path, path_of, spelled
from policy.programs.reading.walk import source_of

# Parameters that name an equation's origin or function, and change nothing that it computes.
_NAMES = frozenset(("name", "debug_info", "fun_name", "ctx_mesh"))
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def first_difference(first: Any, second: Any) -> str | None:
    """Returns a description of the first difference of two jaxprs, closed or open, or None.

    Two jaxprs are the same program if they take arrays of the same shapes and dtypes, run the same
    operations with the same parameters on the same values in the same order, and return the same
    values. Names and source lines are ignored. Constants are compared by value. For a custom
    derivative, the function is compared, but not its rule.
    """
    return next(_differences(first, second, ()), None)


def _differences(first: Any, second: Any, above: Path) -> Iterator[str]:
    """Yields the differences of two programs, which stand in the module `above`."""
    (one, one_consts), (two, two_consts) = opened(first), opened(second)
    arguments = [(*program.constvars, *program.invars) for program in (one, two)]
    where = f" at '{spelled(above)}'" if above else ""
    if _avals(arguments[0]) != _avals(arguments[1]):
        yield f"They take different arguments{where}: {' and '.join(map(_avals, arguments))}."
    for i, (a, b) in enumerate(zip(one_consts, two_consts, strict=True)):
        if not _equal(a, b):
            yield f"They close over different constants{where}: the values of constant {i} differ."
    same = dict(zip(*arguments, strict=True))  # from variables of the first to those of the second
    for i, (a, b) in enumerate(itertools.zip_longest(one.eqns, two.eqns)):
        if a is None or b is None:
            which, extra = ("second", b) if a is None else ("first", a)
            what = f"The {which} program continues after equation {i}, with {_text(extra)}"
            yield what + _place(a, b, above)
            break
        yield from _of_equations(i, a, b, same, above)
        same |= dict(zip(a.outvars, b.outvars, strict=True))
    if len(one.outvars) != len(two.outvars):
        yield f"They return {len(one.outvars)} and {len(two.outvars)} arrays{where}."
    for i, (a, b) in enumerate(zip(one.outvars, two.outvars, strict=True)):
        if not _is_same(a, b, same):
            values = f"{_atom(a)} and {_atom(b)}"
            yield f"They return different values at position {i}{where}: {values}."


def _of_equations(
    i: int, a: Equation, b: Equation, same: dict[Any, Any], above: Path
) -> Iterator[str]:
    name = a.primitive.name

    def told(what: str) -> str:
        return f"Equation {i} {what}{_place(a, b, above)}"

    if _text(a) != _text(b):
        yield told(f"is {_text(a)} in the first and {_text(b)} in the second")
    for k, (x, y) in enumerate(zip(a.invars, b.invars, strict=True)):
        if not _is_same(x, y, same):
            values = f"{_atom(x)} and {_atom(y)}"
            yield told(f"of {name} takes different values as operand {k}: {values}")
    for key in sorted({*a.params, *b.params} - _NAMES):
        ours, theirs = a.params.get(key), b.params.get(key)
        programs = [_programs(ours), _programs(theirs)]
        if any(programs) and len(programs[0]) == len(programs[1]):
            for one, two in zip(*programs, strict=True):
                yield from _differences(one, two, _path(a, above))
        elif not _equal(ours, theirs):
            values = f"{key}={_shortened(ours)} and {key}={_shortened(theirs)}"
            yield told(f"of {name} has {values}")


def _programs(value: Any) -> list[Any]:
    return list(filter(is_jaxpr, value if isinstance(value, (tuple, list)) else [value]))


def _place(a: Any, b: Any, above: Path) -> str:
    """Returns the end of a sentence on two equations, or on one and the end of a program."""
    path = spelled(_path(b if a is None else a, above))
    sources = ["" if one is None else source_of(one) for one in (a, b)]
    lines = " and ".join(source or "unknown" for source in sources)
    at = f" at '{path}'." if path else "."
    return f"{at} Source lines: {lines}." if any(sources) else at


def _equal(a: Any, b: Any) -> bool:
    if callable(a) and callable(b) and not isinstance(a, type):
        return True  # a rule or a thunk, made anew by each trace
    if isinstance(a, (jax.Array, np.ndarray)) or isinstance(b, (jax.Array, np.ndarray)):
        return _equal_arrays(a, b)
    with contextlib.suppress(TypeError, ValueError):
        if bool(a == b):
            return True
    return type(a) is type(b) and _ADDRESS.sub("", repr(a)) == _ADDRESS.sub("", repr(b))


def _equal_arrays(a: Any, b: Any) -> bool:
    if any(not hasattr(x, "dtype") for x in (a, b)) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _is_same(a: Any, b: Any, same: dict[Any, Any]) -> bool:
    if hasattr(a, "val") and hasattr(b, "val"):
        return np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()
    return not hasattr(a, "val") and same.get(a) is b


def _path(equation: Equation, above: Path) -> Path:
    return path_of(str(equation.source_info.name_stack), above)


def _aval(aval: Any) -> str:
    weak = ", weak" if getattr(aval, "weak_type", False) else ""
    dtype = getattr(aval, "dtype", None)
    return f"{aval}" if dtype is None else f"{dtype}[{','.join(map(str, aval.shape))}{weak}]"


def _avals(atoms: Any) -> str:
    return ", ".join(_aval(atom.aval) for atom in atoms)


def _atom(atom: Any) -> str:
    return f"the number {atom.val}" if hasattr(atom, "val") else f"a {_aval(atom.aval)}"


def _text(equation: Any) -> str:
    return f"{equation.primitive.name}({_avals(equation.invars)}) -> {_avals(equation.outvars)}"


def _shortened(value: Any) -> str:
    text = _ADDRESS.sub("", repr(value))
    return text if len(text) <= 120 else text[:120] + "…"
