"""Jaxprs and their equations, alike in all versions of JAX, and the programs inside equations.

A jaxpr holds others in the parameters of its equations. They are found by type, and `subprograms`
alone decides how each is called, so that interpreters and readers need no names of parameters.

`jax.extend.core` has the classes; the abstract values of their variables are typed there without
shapes and dtypes, and closed jaxprs became open ones in jax 0.12.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar

import jax.extend.core as jex_core

from policy.programs.primitives import COMBINES, ELEMENTWISE, KERNELS, REMATS


class Equation(Protocol):
    """An equation of a jaxpr: `jax.extend.core.JaxprEqn`.

    Attributes:
      primitive: the operation.
      invars: variables and literals that it reads; each has an `aval`.
      outvars: the variables that it defines.
      effects: its side effects, such as those of a callback.
      params: the static arguments of the operation, and the programs that it runs.
      source_info: the traceback of the user's code, and the name stack.
      ctx: the settings of JAX that it was traced under.
    """

    primitive: jex_core.Primitive
    invars: Any
    outvars: Any
    effects: Any
    params: dict[str, Any]
    source_info: Any
    ctx: Any


class OpenJaxpr(Protocol):
    """A program whose constants are arguments: `jax.extend.core.Jaxpr`.

    Attributes:
      constvars, invars: the variables of its constants and arguments.
      outvars: variables and literals that it returns.
      eqns: its equations, in an order in which they can run.
      debug_info: the function that was traced, and the names of its arguments.
    """

    constvars: Any
    invars: Any
    outvars: Any
    eqns: Sequence[Equation]
    debug_info: Any


Role = Literal["call", "remat", "shard", "branch", "loop", "cond", "combine", "kernel", "other"]
"""The part that a program plays in its equation.

- "call": runs once, on the equation's operands.
- "remat": the same, and may be computed again in the backward pass.
- "shard": runs once on each device of some mesh axes, on its shard of the operands.
- "branch": one of those that a conditional chooses from by its first operand.
- "loop": the body of a scan or a while.
- "cond": the condition of a while.
- "combine": a function of two numbers that a reduction, a scatter or a sort applies.
- "kernel": another machine's program.
- "other": gets its operands in a way that its primitive alone knows, as the solvers of a linear
  solve do.
"""

T = TypeVar("T")
_JAXPRS = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one class since jax 0.12
_SCALARS = frozenset({bool, int, float, str, type(None)})  # most parameters of equations


@dataclasses.dataclass(frozen=True, slots=True)
class Subprogram:
    """A program inside an equation.

    Its arguments are constants, then the carry, then the rows of arrays that are scanned over. It
    returns the results of the equation one for one; a loop returns its carry first, and a condition
    whether the loop goes on.

    Attributes:
      jaxpr: the program, open or closed, as the equation holds it.
      parameter: the name of the parameter that holds it.
      place: its index in that parameter; None where the parameter is the program itself.
      role: see `Role`.
      operands: the operand of the equation that each of its arguments is, or is a row or shard of,
        by index; None in the roles "combine", "kernel" and "other".
      carried: number of its arguments that a loop carries.
      scanned: number of its arguments that are rows.
      count: number of runs for each run of the equation. A loop that is no scan counts as one.
      axes: names and sizes of the mesh axes along which each device runs it on its own.
    """

    jaxpr: Any
    parameter: str
    place: int | None
    role: Role
    operands: tuple[int, ...] | None = None
    carried: int = 0
    scanned: int = 0
    count: int = 1
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def body(self) -> OpenJaxpr:
        """The open jaxpr."""
        return opened(self.jaxpr)[0]

    @property
    def consts(self) -> list[Any]:
        """The constants of a closed jaxpr: the values of `body.constvars`."""
        return opened(self.jaxpr)[1]

    @property
    def is_run(self) -> bool:
        """Returns whether its equations run as those of the program around it do.

        The function that a reduction applies to two numbers is no such program, and neither is a
        kernel.
        """
        return self.role not in ("combine", "kernel")

    @property
    def fixed(self) -> slice:
        """The arguments that are neither carried nor rows."""
        return slice(0, len(self.operands or ()) - self.carried - self.scanned)

    @property
    def carry(self) -> slice:
        """The arguments that a loop carries."""
        return slice(self.fixed.stop, self.fixed.stop + self.carried)

    @property
    def rows(self) -> slice:
        """The arguments that are rows of arrays that are scanned over."""
        return slice(self.carry.stop, self.carry.stop + self.scanned)

    def given(self, values: Sequence[T]) -> list[T]:
        """Returns those of the equation's operands that the arguments are made of, in their order.

        Nothing is known of them in the roles "combine", "kernel" and "other".
        """
        assert self.operands is not None, self.role
        return [values[i] for i in self.operands]


def subprograms(equation: Equation) -> tuple[Subprogram, ...]:
    """Returns the programs inside an equation, in the order of its parameters.

    The condition of a while comes before its body. Most equations hold none.
    """
    found = _found(equation)
    if not found:
        return ()
    name, count = equation.primitive.name, len(equation.invars)
    if name == "scan":
        consts, carried = scan_arity(equation)
        length = equation.params.get("length", 1)
        runs = length if isinstance(length, int) else 1
        rows = count - consts - carried
        return tuple(
            Subprogram(*one, "loop", tuple(range(count)), carried, rows, runs) for one in found
        )
    if name == "while":
        both = [_of_while(equation, *one) for one in found]
        return tuple(sorted(both, key=lambda one: one.role))  # the condition first
    if name == "cond":
        return tuple(Subprogram(*one, "branch", tuple(range(1, count))) for one in found)
    if name in KERNELS or name in COMBINES:
        role: Role = "kernel" if name in KERNELS else "combine"
        return tuple(Subprogram(*one, role) for one in found)
    body, _ = opened(found[0][0])
    fits = len(body.invars) == count and len(body.outvars) == len(equation.outvars)
    if len(found) > 1 or not fits:
        return tuple(Subprogram(*one, "other") for one in found)
    role = "shard" if name == "shard_map" else "remat" if name in REMATS else "call"
    axes = _axes(equation) if name == "shard_map" else ()
    return (Subprogram(*found[0], role, tuple(range(count)), axes=axes),)


def is_jaxpr(value: Any) -> bool:
    """Returns whether a parameter's value is a program, open or closed."""
    return isinstance(value, _JAXPRS)


def _found(equation: Equation) -> list[tuple[Any, str, int | None]]:
    found: list[tuple[Any, str, int | None]] = []
    if equation.primitive.name in ELEMENTWISE:  # most equations
        return found
    for parameter, value in equation.params.items():
        if type(value) in _SCALARS:
            continue
        if is_jaxpr(value):
            found.append((value, parameter, None))
        elif isinstance(value, (tuple, list)):
            found += [
                (one, parameter, i)
                for i, one in enumerate(value)
                if type(one) not in _SCALARS and is_jaxpr(one)
            ]
    return found


def _of_while(equation: Equation, jaxpr: Any, parameter: str, place: int | None) -> Subprogram:
    of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    count = len(equation.invars)
    carried = count - of_cond - of_body
    if parameter == "body_jaxpr":
        return Subprogram(jaxpr, parameter, place, "loop", tuple(range(of_cond, count)), carried)
    operands = (*range(of_cond), *range(of_cond + of_body, count))
    return Subprogram(jaxpr, parameter, place, "cond", operands, carried)


def _axes(equation: Equation) -> tuple[tuple[str, int], ...]:
    params = equation.params
    manual = params.get("manual_axes", params.get("axis_names"))
    sizes = dict(getattr(params.get("mesh"), "shape", {}) or {})
    return tuple((axis, int(size)) for axis, size in sizes.items() if not manual or axis in manual)


def subprogram(equation: Equation, role: Role) -> Subprogram:
    """Returns the one program of an equation that has a role."""
    (found,) = (one for one in subprograms(equation) if one.role == role)
    return found


def with_subprograms(equation: Equation, jaxprs: Sequence[Any]) -> dict[str, Any]:
    """Returns the parameters of an equation with `jaxprs` in place of its subprograms, in order."""
    params = dict(equation.params)
    for one, jaxpr in zip(subprograms(equation), jaxprs, strict=True):
        if one.place is None:
            params[one.parameter] = jaxpr
            continue
        held = params[one.parameter]
        items = [jaxpr if i == one.place else item for i, item in enumerate(held)]
        params[one.parameter] = getattr(held, "_make", type(held))(items)
    return params


def opened(jaxpr: Any) -> tuple[OpenJaxpr, list[Any]]:
    """Returns a jaxpr, open or closed, as an open one and its constants.

    Since jax 0.12, one class is both.
    """
    consts = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def with_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """Returns a jaxpr, open or closed, with other equations."""
    body: Any = opened(jaxpr)[0]
    result = body.replace(eqns=equations)
    return result if jaxpr is body else jaxpr.replace(jaxpr=result)


def with_consts_as_arguments(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a jaxpr as an open one whose first arguments are its constants, and these."""
    body: Any = opened(jaxpr)[0]
    consts = opened(jaxpr)[1]
    if not consts:
        return body, []
    merged = {"consts": ()} if body is jaxpr else {}  # jax 0.12: an open jaxpr holds them
    return body.replace(**merged, constvars=(), invars=(*body.constvars, *body.invars)), consts


def scan_arity(equation: Equation) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a scan.

    Read from shapes: the parameters that say so were renamed and made private in jax 0.11. An array
    that is scanned over, or stacked, has one axis more outside than in the body.
    """
    body = next(programs_of(equation))
    carried = _with_same_rank(equation.outvars, body.outvars)
    return _with_same_rank(equation.invars, body.invars) - carried, carried


def _with_same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    ranks = ([len(getattr(v.aval, "shape", ())) for v in variables] for variables in (outer, inner))
    return sum(a == b for a, b in zip(*ranks, strict=True))


def programs_of(equation: Equation) -> Iterator[OpenJaxpr]:
    """Yields the open jaxpr of each program inside an equation, in any role."""
    for jaxpr, *_ in _found(equation):
        yield opened(jaxpr)[0]


def bind(
    equation: Equation, arrays: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Returns the outputs of an equation's primitive on other operands, or with other `params`."""
    primitive = equation.primitive
    given = primitive.get_bind_params(equation.params if params is None else params)
    outputs = primitive.bind(*arrays, **given)
    return list(outputs) if primitive.multiple_results else [outputs]


def equations_within(jaxpr: OpenJaxpr, *, once: bool = False) -> Iterator[Equation]:
    """Yields every equation of an open jaxpr and of programs inside it, in any role and order.

    Args:
      jaxpr: an open jaxpr.
      once: reads a program that several equations hold for the first of them alone.
    """
    waiting, seen = [jaxpr], {id(jaxpr)}
    while waiting:
        for equation in waiting.pop().eqns:
            yield equation
            inner = [one for one in programs_of(equation) if not once or id(one) not in seen]
            seen.update(map(id, inner))
            waiting.extend(inner)


def runs_any(jaxpr: OpenJaxpr, names: Collection[str]) -> bool:
    """Returns whether an open jaxpr, or a program that it runs, has one of these primitives.

    Kernels and the functions that reductions apply to two numbers are not looked into.
    """
    return any(
        equation.primitive.name in names
        or any(one.is_run and runs_any(one.body, names) for one in subprograms(equation))
        for equation in jaxpr.eqns
    )


def is_unwritten(jaxpr: OpenJaxpr, first: int = 0) -> list[bool]:
    """Returns, for each argument of an open jaxpr, whether no output can be its new value.

    A new value has the same shape, and is not the argument itself nor another one.

    Args:
      jaxpr: an open jaxpr.
      first: the index of the first output that may be one.
    """
    given = set(jaxpr.invars)
    written = {
        getattr(atom.aval, "shape", None)
        for atom in jaxpr.outvars[first:]
        if isinstance(atom, jex_core.Literal) or atom not in given
    }
    return [getattr(variable.aval, "shape", None) not in written for variable in jaxpr.invars]


def held_program(equation: Equation) -> Any:
    """Returns the one program that an equation runs, closed or open as the equation holds it.

    Returns None for equations that run no program, or several, as a while and a conditional do.
    """
    inner = subprograms(equation)
    is_one = len(inner) == 1 and inner[0].place is None and inner[0].is_run
    return inner[0].jaxpr if is_one else None


_SHARED = 3  # equations of a jit that is worth a trace of its own


def repeated_programs(jaxpr: OpenJaxpr) -> frozenset[int]:
    """Returns the `id`s of programs that several equations of a jaxpr, or of its `jit`s, hold."""
    counts: collections.Counter[int] = collections.Counter()
    bodies = [jaxpr]
    while bodies:
        for equation in bodies.pop().eqns:
            program = held_program(equation)
            if program is None:
                continue
            is_jit = equation.primitive.name in ("jit", "pjit")
            body = opened(program)[0] if is_jit else None
            if body is not None and not counts[id(program)]:
                bodies.append(body)
            counts[id(program)] += body is None or len(body.eqns) >= _SHARED
    return frozenset(identity for identity, count in counts.items() if count > 1)
