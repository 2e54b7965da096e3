"""Programs in two parts: what some outputs are made of, and all the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core

from policy.programs.jaxprs import Equation, OpenJaxpr, bind, opened
from policy.programs.rewriting.interpreter import Interpreter, call, has_options


class AsTraced(Interpreter[Any]):
    """Evaluates a program as it was traced.

    Args:
      inlines: whether the functions are inlined that the program calls by `jax.jit`, without
        options.
    """

    def __init__(self, *, inlines: bool = False):
        super().__init__()
        self.inlines = inlines

    def literal(self, literal: jex_core.Literal) -> Any:
        return literal.val  # weakly typed, if it was

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        if self.inlines and equation.primitive.name in _JITS and not has_options(equation):
            return call(self, equation, values)
        return bind(equation, values)


_JITS = ("jit", "pjit")


@dataclasses.dataclass
class _Part:
    """Some equations as a program, see `OpenJaxpr`."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    debug_info: Any = None


class TwoParts:
    """A program in two parts.

    Args:
      jaxpr: a closed jaxpr.
      first: the outputs that the first part computes, by their places.
    """

    def __init__(self, jaxpr: Any, first: Collection[int]):
        body, self._consts = opened(jaxpr)
        self.first = sorted(first)
        needed = _behind(body, [body.outvars[i] for i in self.first])
        parts = [
            [e for i, e in enumerate(body.eqns) if (i in needed) is is_first]
            for is_first in (True, False)
        ]
        read = {atom for equation in parts[1] for atom in _variables(equation.invars)}
        read |= {*_variables(body.outvars)}
        between = [v for equation in parts[0] for v in equation.outvars if v in read]
        outputs = [body.outvars[i] for i in self.first]
        self._parts = (
            _Part(body.constvars, body.invars, [*outputs, *between], parts[0]),
            _Part(body.constvars, [*body.invars, *between], body.outvars, parts[1]),
        )

    def begin(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the first outputs, and the values that the second part reads."""
        found = AsTraced().run(self._parts[0], self._consts, arrays)
        return found[: len(self.first)], found[len(self.first) :]

    def finish(self, arrays: Sequence[Any], between: Sequence[Any]) -> list[Any]:
        """Returns all outputs."""
        return AsTraced().run(self._parts[1], self._consts, [*arrays, *between])


def _variables(atoms: Iterable[Any]) -> Iterable[Any]:
    return (atom for atom in atoms if not isinstance(atom, jex_core.Literal))


def _behind(body: OpenJaxpr, atoms: Iterable[Any]) -> set[int]:
    """Returns the places of the equations that some variables depend on."""
    needed, wanted = set(), {*_variables(atoms)}
    for i in reversed(range(len(body.eqns))):
        equation = body.eqns[i]
        if not wanted.isdisjoint(equation.outvars):
            needed.add(i)
            wanted.update(_variables(equation.invars))
    return needed


def made_before(jaxpr: Any, outputs: Iterable[int], others: Iterable[int]) -> list[int]:
    """Returns those of some outputs that depend on no equation that makes one of `others`."""
    body, _ = opened(jaxpr)
    made = {*_variables(body.outvars[i] for i in others)}
    last = {i for i, equation in enumerate(body.eqns) if not made.isdisjoint(equation.outvars)}
    return [i for i in outputs if last.isdisjoint(_behind(body, [body.outvars[i]]))]


def inlined(jaxpr: Any) -> Any:
    """Returns a closed jaxpr with the functions inlined that it calls by `jax.jit`."""
    body, consts = opened(jaxpr)
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in body.invars
    ]
    return jax.make_jaxpr(lambda *arrays: AsTraced(inlines=True).run(body, consts, arrays))(*shapes)
