"""Compares two programs up to their first difference."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from policy.inspect.traced.authors import source_of
from policy.programs.jaxprs import Equation, is_jaxpr, opened
from policy.programs.paths import Path, path_of, spelled

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
    end = ("nothing", "")
    for one, two in itertools.zip_longest(_steps(first), _steps(second), fillvalue=end):
        if one[0] != two[0]:
            return f"The first has {''.join(one)}; the second has {''.join(two)}."
    return None


def _steps(jaxpr: Any, above: Path = ()) -> Iterator[tuple[str, str]]:
    """Yields the arguments, constants, equations and results of a program that stands in the module
    `above`: a text that numbers variables in their order, and the place in the user's code.
    """
    body, constants = opened(jaxpr)
    numbers: dict[Any, int] = {}

    def listed(atoms: Any) -> str:
        return ", ".join(f"{_aval(atom.aval)} {name(atom)}" for atom in atoms)

    def name(atom: Any) -> str:
        if isinstance(atom, jex_core.Literal):
            return str(np.asarray(atom.val).tolist())
        return f"%{numbers.setdefault(atom, len(numbers))}"

    yield f"the arguments {listed((*body.constvars, *body.invars))}", ""
    for i, constant in enumerate(constants):
        yield f"the constant {i}, {_text(constant)}", ""
    for equation in body.eqns:
        path = path_of(str(equation.source_info.name_stack), above)
        params = {key: equation.params[key] for key in sorted(equation.params.keys() - _NAMES)}
        programs = {key: _programs(value) for key, value in params.items()}
        given = ", ".join(f"{key}={_text(params[key])}" for key in params if not programs[key])
        operation = f"{equation.primitive.name}({listed(equation.invars)})"
        options = f" with {given}" if given else ""
        yield f"{operation} -> {listed(equation.outvars)}{options}", _place(equation, path)
        for program in itertools.chain.from_iterable(programs.values()):
            yield from _steps(program, path)
    yield f"the results {listed(body.outvars)}", ""


def _programs(value: Any) -> list[Any]:
    return list(filter(is_jaxpr, value if isinstance(value, (tuple, list)) else [value]))


def _place(equation: Equation, path: Path) -> str:
    at, source = spelled(path), source_of(equation)
    return f"{at and f' at {at!r}'}{source and f', {source}'}"


def _aval(aval: Any) -> str:
    weak = ", weak" if getattr(aval, "weak_type", False) else ""
    dtype = getattr(aval, "dtype", None)
    return f"{aval}" if dtype is None else f"{dtype}[{','.join(map(str, aval.shape))}{weak}]"


def _text(value: Any) -> str:
    """Returns a text that is the same for equal parameters and constants of two traces."""
    if callable(value) and not isinstance(value, type):
        return "a function"  # a rule or a thunk, made anew by each trace
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim:
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        return f"{_aval(value)} of digest {hashlib.sha256(array.tobytes()).hexdigest()[:8]}"
    return _ADDRESS.sub("", repr(value))
