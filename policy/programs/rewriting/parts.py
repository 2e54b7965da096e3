"""Programs in two parts: what some outputs are made of, and all the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.programs.jaxprs import Equation, OpenJaxpr, bind, opened, subprogram
from policy.programs.rewriting.interpreter import Interpreter, call, has_options, manual_axes


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
      others: those that it leaves to the second part. If there are any, the first part has the
        whole backward pass: what it saves of the forward pass is freed then.

    Attributes:
      between: the variables that the first part makes and the second reads.
    """

    def __init__(self, jaxpr: Any, first: Collection[int], others: Collection[int] = ()):
        body, self._consts = opened(jaxpr)
        self.first = sorted(first)
        outputs = [body.outvars[i] for i in self.first]
        gradients = _made_backward(body, [body.outvars[i] for i in others]) if others else ()
        needed = _behind(body, [*outputs, *gradients])
        parts = [
            [e for i, e in enumerate(body.eqns) if (i in needed) is is_first]
            for is_first in (True, False)
        ]
        read = {atom for equation in parts[1] for atom in _variables(equation.invars)}
        read |= {*_variables(body.outvars)}
        self.between = between = [v for e in parts[0] for v in e.outvars if v in read]
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


def _made_backward(body: OpenJaxpr, others: Iterable[Any]) -> Iterator[Any]:
    """Yields the results of the backward pass that depend on no equation that makes one of some
    variables.
    """
    after = {*_variables(others)}
    for equation in body.eqns:
        if not after.isdisjoint((*equation.outvars, *_variables(equation.invars))):
            after.update(equation.outvars)
        elif "transpose(" in str(equation.source_info.name_stack):
            yield from equation.outvars


def made_before(jaxpr: Any, outputs: Iterable[int], others: Iterable[int]) -> list[int]:
    """Returns those of some outputs that depend on no equation that makes one of `others`."""
    body, _ = opened(jaxpr)
    made = {*_variables(body.outvars[i] for i in others)}
    last = {i for i, equation in enumerate(body.eqns) if not made.isdisjoint(equation.outvars)}
    return [i for i in outputs if last.isdisjoint(_behind(body, [body.outvars[i]]))]


def divisible(jaxpr: Any, outputs: Sequence[int], others: Sequence[int]) -> tuple[Any, list[int]]:
    """Returns a program, and those of some outputs that depend on nothing that makes `others`.

    Functions of `jax.jit` are inlined, and a `shard_map` is divided in two, if there are more of
    them in the program then.

    Args:
      jaxpr: a closed jaxpr.
      outputs, others: places of outputs.
    """
    found = made_before(jaxpr, outputs, others)
    for rewrite in (_inlined, _with_divided_maps):
        if len(found) < len(outputs):
            rewritten = rewrite(jaxpr, outputs)
            more = made_before(rewritten, outputs, others)
            jaxpr, found = (rewritten, more) if len(more) >= len(found) else (jaxpr, found)
    return jaxpr, found


def _inlined(jaxpr: Any, _: Sequence[int]) -> Any:
    return _again(jaxpr, AsTraced(inlines=True))


def _again(jaxpr: Any, run: AsTraced) -> Any:
    body, consts = opened(jaxpr)
    avals = (variable.aval for variable in body.invars)
    return jax.make_jaxpr(lambda *arrays: run.run(body, consts, arrays))(*avals)


def _with_divided_maps(jaxpr: Any, outputs: Sequence[int]) -> Any:
    body, _ = opened(jaxpr)
    return _again(jaxpr, _Dividing({*_variables(body.outvars[i] for i in outputs)}))


class _Dividing(AsTraced):
    """Evaluates a `shard_map` in two, of which the first computes some of its results.

    Args:
      first: the variables of these results.
    """

    def __init__(self, first: Collection[Any]):
        super().__init__()
        self.first = first

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        first = [i for i, variable in enumerate(equation.outvars) if variable in self.first]
        if equation.primitive.name != "shard_map" or not first:
            return super().equation(equation, values)
        params = equation.params
        parts = TwoParts(subprogram(equation, "shard").jaxpr, first)
        axes = manual_axes(equation)
        stacked = [_axes_of(variable, params["check_vma"], axes) for variable in parts.between]
        specs = [PartitionSpec(each or None) for each in stacked]  # a device's own has a new axis

        def begin(*arrays: Any) -> Any:
            found, between = parts.begin(arrays)
            return found, [jnp.expand_dims(x, 0) for x in between]

        def finish(between: list[Any], *arrays: Any) -> Any:
            return parts.finish(arrays, [jnp.squeeze(x, 0) for x in between])

        mapped = functools.partial(
            jax.shard_map,
            mesh=params["mesh"],
            check_vma=params["check_vma"],
            axis_names=frozenset(axes),
        )
        given, results = tuple(params["in_specs"]), list(params["out_specs"])
        out_specs = ([results[i] for i in first], specs)
        found, between = mapped(begin, in_specs=given, out_specs=out_specs)(*values)
        rest = mapped(finish, in_specs=(specs, *given), out_specs=results)(between, *values)
        return [found[first.index(i)] if i in first else one for i, one in enumerate(rest)]


def _axes_of(variable: Any, is_typed: bool, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes over which devices hold different values of a variable."""
    if not is_typed:
        return axes
    kind = getattr(variable.aval, "manual_axis_type", None)
    varying = frozenset[Any]() if kind is None else kind.varying
    return tuple(axis for axis in axes if axis in varying)
