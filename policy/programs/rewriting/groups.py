"""Groups of equations that an interpreter evaluates as one."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.extend import source_info_util

from policy.programs.jaxprs import Equation, OpenJaxpr
from policy.programs.reading.attention import Attention


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations of an attention: an equation to a program, and a program itself."""

    attention: Attention
    invars: Sequence[Any]
    constvars = ()

    @classmethod
    def of(cls, attention: Attention) -> Group:
        made = {v for equation in attention.equations for v in equation.outvars}
        atoms = (atom for equation in attention.equations for atom in equation.invars)
        read = dict.fromkeys(atom for atom in atoms if not isinstance(atom, jex_core.Literal))
        return cls(attention, [variable for variable in read if variable not in made])

    @property
    def is_complete(self) -> bool:
        """Returns whether it reads all that a kernel is given."""
        attention = self.attention
        read = {x.variable for x in (attention.query, attention.key, attention.value)}
        read |= {leaf for mask in attention.masks for leaf in mask.leaves}
        read |= {attention.bias[0]} if attention.bias else set()
        return read <= {*self.invars}

    @property
    def eqns(self) -> Sequence[Equation]:
        return self.attention.equations

    @property
    def last(self) -> Equation:
        return self.eqns[-1]

    @property
    def outvars(self) -> Sequence[Any]:
        return self.last.outvars

    @property
    def source_info(self) -> Any:
        return self.last.source_info

    @property
    def ctx(self) -> Any:
        return self.last.ctx


def with_groups(jaxpr: OpenJaxpr, groups: Mapping[int, Group]) -> Any:
    """Returns a program with groups, by the identities of their last equations, as equations."""
    inside = {id(equation) for group in groups.values() for equation in group.eqns}
    eqns = [
        groups.get(id(equation), equation)
        for equation in jaxpr.eqns
        if id(equation) in groups or id(equation) not in inside
    ]
    variables = {name: getattr(jaxpr, name) for name in ("constvars", "invars", "outvars")}
    return types.SimpleNamespace(**variables, eqns=eqns)


def names_around(names: Any) -> contextlib.AbstractContextManager[Any]:
    """Leaves out the names of a group, the innermost ones: its equations put their own there."""
    stack = source_info_util.current_name_stack()
    around = stack.stack[: len(stack.stack) - len(names.stack)]
    return source_info_util.set_name_stack(type(stack)(around))
