"""Gradients whose sums over the uses of a weight, and over its elements, are in float32.

JAX sums the cotangents of a value in that value's dtype: a bfloat16 parameter with 64 uses gets its
64 contributions added in bfloat16. Here the gradient program is traced, and evaluated with those
sums in float32. The matmuls that make the contributions round them to half precision once, or
return their accumulators (`grads="accumulator"`). Their operands stay in half precision, and so
does every cotangent of an activation.

A search finds the sums that reach a gradient only by rounding. It walks from the gradients back
over casts and over operations that move, add or scale numbers, to the additions over the uses of a
weight, the sums over its elements, and the casts that round to half precision; for accumulators
also to matmuls and convolutions. It enters programs inside of others (`jit`, `scan`, `cond`,
`checkpoint`, `shard_map`) and custom derivative rules alike. An exchange between devices stays in
the dtype that JAX gives it; with accumulators it is in float32, unless `policy.sharding` was asked
for another dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, Var
from jax.typing import DTypeLike

from policy.core.arrays import is_overwritten
from policy.programs.dtypes import F32, float_dtype, holds_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    Subprogram,
    bind,
    opened,
    programs_of,
    subprogram,
    subprograms,
)
from policy.programs.marks import EXCHANGE, innermost_scope
from policy.programs.primitives import (
    ANNOTATES,
    LINEAR_IN_ALL,
    MATMULS,
    MOVES_COTANGENTS,
    ONE_FOR_EACH,
    PRODUCTS,
    RUNS_PROGRAMS,
    SUMMING_COLLECTIVES,
    WIDENABLE_SUMS,
)
from policy.programs.rewriting import interpreter
from policy.programs.rewriting.interpreter import Body, Interpreter, has_options
from policy.programs.tracing.pure_calls import ArrayTree

_HANDS_ON = MOVES_COTANGENTS | ANNOTATES
"""Hand on the numbers of their first operand, in its dtype."""


def with_float32_sums(
    differentiated: Callable[..., tuple[Any, Any]],
    positions: Sequence[int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    accumulators: bool,
) -> tuple[Any, Any]:
    """Calls a function that returns a value and gradients, and sums the gradients in float32.

    The call is traced with the differentiated arguments alone: others keep their values.

    Args:
      differentiated: returns a pair, whose second part are the gradients of some arguments.
      positions: the positions of those arguments.
      args: the positional arguments of the call.
      kwargs: its keyword arguments.
      accumulators: whether the gradients are accumulators of matmuls, too. Without it, a function
        of float32 weights runs as it is: JAX sums their gradients in float32.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path([args[i] for i in positions])
    leaves, is_weight = [x for _, x in found], [not is_overwritten(path) for path, _ in found]
    halves = [holds_half(x) and one for x, one in zip(leaves, is_weight, strict=True)]
    if not (accumulators or any(halves)):
        return differentiated(*args, **kwargs)
    rest: list[ArrayTree] = []

    def arrays_of(*leaves: Any) -> list[Any]:
        full = list(args)
        for position, arg in zip(positions, jax.tree.unflatten(treedef, leaves), strict=True):
            full[position] = arg
        arrays, other = ArrayTree.divided(differentiated(*full, **kwargs))
        rest[:] = [other]
        return arrays

    jaxpr = jax.make_jaxpr(arrays_of)(*leaves)
    others = len(opened(jaxpr)[0].outvars) - len(leaves)
    is_gradient = [False] * others + is_weight
    return rest[0].filled(evaluated(jaxpr, leaves, is_gradient, accumulators=accumulators))


def evaluated(
    jaxpr: Any, arrays: Sequence[Any], is_gradient: Sequence[bool], *, accumulators: bool
) -> list[Any]:
    """Returns the results of a program, the sums in its gradients in float32.

    Args:
      jaxpr: an open or closed jaxpr that returns gradients, among others.
      arrays: its arguments.
      is_gradient: for each result, whether it is a gradient: one that was summed in half precision,
        or cast from half precision, is returned as the float32 sum before.
      accumulators: whether the results of matmuls and convolutions are such sums.
    """
    body, consts = opened(jaxpr)
    search = _Search(accumulators)
    search.reached(body, is_gradient, [True] * len(body.invars))
    sums = RoundedSums(accumulators, frozenset(search.rounded), frozenset(search.widened))
    results = Float32Sums(sums).run(body, consts, arrays)
    pairs = zip(results, is_gradient, strict=True)
    return [x.value if one and isinstance(x, Wide) else read(x) for x, one in pairs]


@dataclasses.dataclass(frozen=True)
class Wide:
    """A float32 sum that stands for the half-precision one of the program.

    Attributes:
      value: the float32 array.
      dtype: the half dtype.
    """

    value: Any
    dtype: DTypeLike


def read(x: Any) -> Any:
    """Returns a wide value as the half one that it stands for; others as they are."""
    return x.value.astype(x.dtype) if isinstance(x, Wide) else x


class Float32Sums(Interpreter[Any]):
    """Evaluates gradient programs on values that are arrays, or `Wide` ones.

    Args:
      sums: the sums that a gradient widens.
    """

    def __init__(self, sums: RoundedSums):
        super().__init__()
        self.sums = sums

    def literal(self, literal: Any) -> Any:
        return literal.val

    def arrays(self, value: Any) -> tuple[Any]:
        return (value.value if isinstance(value, Wide) else value,)

    def filled(self, value: Any, arrays: Sequence[Any]) -> Any:
        (array,) = arrays
        return _like(value, array)

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        is_wide = any(isinstance(x, Wide) for x in values)
        name = equation.primitive.name
        if name in RUNS_PROGRAMS and (
            is_wide or any(self.sums.within(one).rounded for one in programs_of(equation))
        ):
            return self._run_programs(equation, values)
        if not self.sums.rounded.isdisjoint(equation.outvars):
            return [_unrounded(equation, values)]
        if not is_wide:
            return bind(equation, values)
        results = self._moved(equation, values)
        return bind(equation, [read(x) for x in values]) if results is None else results

    def _moved(self, equation: Equation, values: list[Any]) -> list[Any] | None:
        """Returns the results of an operation that moves or widens wide values, or None."""
        name = equation.primitive.name
        if name == "convert_element_type":
            new = equation.params["new_dtype"]
            return bind(equation, [values[0].value]) if jnp.dtype(new).itemsize >= 4 else None
        if (name in _HANDS_ON or _sums_nothing(equation)) and isinstance(values[0], Wide):
            return [_like(values[0], x) for x in bind(equation, [values[0].value, *values[1:]])]
        if name in ONE_FOR_EACH and not self._is_in_its_dtype(equation):
            return self.refilled(values, bind(equation, self.flat(values)))
        return None

    def _is_in_its_dtype(self, equation: Equation) -> bool:
        """Returns whether an equation is an exchange that keeps its dtype."""
        if equation.primitive.name not in SUMMING_COLLECTIVES:
            return False
        return not self.sums.accumulators or innermost_scope(equation) == EXCHANGE

    def _run_programs(self, equation: Equation, values: list[Any]) -> list[Any]:
        if equation.primitive.name == "jit" and not has_options(equation):
            kinds = tuple(x.dtype if isinstance(x, Wide) else None for x in values)
            program = subprogram(equation, "call")
            sums = self.sums.within(program.body)
            call, body = _jitted(sums, program, kinds, equation.params["name"])
            results = call(*self.flat(values))
            return self.refilled(body.outputs, results)
        handler = interpreter.handler_of(equation)
        if handler is None:
            return bind(equation, [read(x) for x in values])
        return handler(self, equation, values)

    def merge(
        self, equation: Equation, values: Sequence[Any], branches: Sequence[Any] = ()
    ) -> list[Any]:
        """Returns wide values for the results in half precision that a gradient widens."""
        return [
            Wide(variable.aval, variable.aval.dtype)
            if variable in self.sums.widened and holds_half(variable.aval)
            else variable.aval
            for variable in equation.outvars
        ]

    def settled(self, value: Any, like: Any) -> Any:
        if isinstance(like, Wide):
            return value if isinstance(value, Wide) else Wide(_widened(value), like.dtype)
        return read(value)


def _unrounded(equation: Equation, values: Sequence[Any]) -> Wide:
    """Returns the result of a sum, a product or a cast, before it is rounded."""
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    if name in MATMULS:
        params = equation.params | {"preferred_element_type": F32}
        (result,) = bind(equation, [read(x) for x in values], params)
    elif name == "convert_element_type":
        (result,) = values
    elif name == "scatter-add":  # it holds a program that adds two numbers of its dtype
        params, (operand, indices, summands) = equation.params, map(_widened, values)
        result = lax.scatter_add(
            operand,
            indices,
            summands,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )
    else:
        (result,) = bind(equation, [_widened(x) for x in values])
    return Wide(result, dtype)


def _like(value: Any, array: Any) -> Any:
    """Returns an array as a wide value where `value` is one."""
    return dataclasses.replace(value, value=array) if isinstance(value, Wide) else array


def _widened(x: Any) -> Any:
    """Returns a wide value's float32 array, and half-precision arrays cast to float32."""
    if isinstance(x, Wide):
        return x.value
    return jnp.asarray(x).astype(F32) if holds_half(jax.typeof(x)) else x


@functools.lru_cache(maxsize=1024)
def _jitted(
    sums: RoundedSums, program: Subprogram, kinds: tuple[Any, ...], name: str
) -> tuple[Any, Body[Any]]:
    inputs = [None if dtype is None else Wide(None, dtype) for dtype in kinds]
    body = Body(Float32Sums(sums), program, inputs)

    def call(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    call.__name__ = name
    return jax.jit(call), body


@dataclasses.dataclass(frozen=True)
class RoundedSums:
    """The variables of a gradient program that hold sums which a gradient widens.

    Attributes:
      accumulators: whether matmuls and convolutions are among the sums.
      rounded: results of sums, products and casts that round to half precision, and, where asked
        for, of matmuls and convolutions.
      widened: results, of equations that hold programs, that are float32 where half precision was
        traced.
    """

    accumulators: bool
    rounded: frozenset[Var]
    widened: frozenset[Var]

    def within(self, jaxpr: OpenJaxpr) -> RoundedSums:
        """Returns those of a program inside this one, and of the programs inside of it."""
        inside = set(_results_of(jaxpr))
        return dataclasses.replace(
            self, rounded=self.rounded & inside, widened=self.widened & inside
        )


@functools.lru_cache(maxsize=4096)
def _results_of(jaxpr: OpenJaxpr) -> frozenset[Any]:
    """Returns the variables that the equations of a program, and of those inside of it, define."""
    found = {variable for equation in jaxpr.eqns for variable in equation.outvars}
    inner = [one for equation in jaxpr.eqns for one in programs_of(equation)]
    return frozenset(found.union(*map(_results_of, inner)))


class _Search:
    """Collects the sums of `RoundedSums`.

    Of each program that it enters, it knows which variables are computed from weights alone: a
    cotangent that one of these multiplies is searched further.
    """

    def __init__(self, accumulators: bool) -> None:
        self.accumulators = accumulators
        self.rounded: set[Any] = set()
        self.widened: set[Any] = set()
        self._known: dict[Any, list[bool]] = {}

    def reached(
        self, jaxpr: OpenJaxpr, is_wanted: Sequence[bool], is_weight: Sequence[bool]
    ) -> list[bool]:
        """Returns for each argument of a program whether its numbers reach a wanted result."""
        key = (jaxpr, tuple(is_wanted), tuple(is_weight))
        if key not in self._known:
            weights = _of_weights(jaxpr, is_weight)
            wanted = {
                atom
                for atom, one in zip(jaxpr.outvars, is_wanted, strict=True)
                if one and not isinstance(atom, Literal)
            }
            for equation in reversed(jaxpr.eqns):
                if not wanted.isdisjoint(equation.outvars):
                    found = [equation.invars[i] for i in self._operands(equation, wanted, weights)]
                    wanted.update(atom for atom in found if not isinstance(atom, Literal))
            self._known[key] = [variable in wanted for variable in jaxpr.invars]
        return self._known[key]

    def _operands(self, equation: Equation, wanted: set[Any], weights: set[Any]) -> Sequence[int]:
        """Returns the operands of an equation whose numbers its wanted results hold, by index."""
        name = equation.primitive.name
        if name in RUNS_PROGRAMS:
            is_wanted = [v in wanted for v in equation.outvars]
            return self._of_programs(equation, is_wanted, weights)
        if name in ONE_FOR_EACH:
            return [i for i, result in enumerate(equation.outvars) if result in wanted]
        result, operands = equation.outvars[0], equation.invars
        dtype = float_dtype(result.aval)
        if dtype is None:
            return ()
        if name == "convert_element_type":
            return self._of_cast(equation)
        if name in _HANDS_ON or _sums_nothing(equation):
            return (0,)
        is_half = holds_half(result.aval)
        is_matmul = name in MATMULS and all(holds_half(x.aval) for x in operands[:2])
        if is_half and (name in WIDENABLE_SUMS or (self.accumulators and is_matmul)):
            self.rounded.add(result)
            return ()
        of_dtype = [i for i, x in enumerate(operands) if float_dtype(x.aval) == dtype]
        if name in PRODUCTS:
            if self.accumulators and not is_half:
                return of_dtype
            # the operand that the other one, of weights, scales
            first, second = (_is_of_weights(atom, weights) for atom in operands)
            of_dtype = [int(first)] if first != second else []
        elif name not in LINEAR_IN_ALL:
            return ()
        if of_dtype and is_half:
            self.rounded.add(result)
        return of_dtype

    def _of_cast(self, equation: Equation) -> Sequence[int]:
        """Follows casts to other widths, and notes those that round to half."""
        before, after = float_dtype(equation.invars[0].aval), float_dtype(equation.outvars[0].aval)
        if before is None or after is None:
            return ()
        if before.itemsize > after.itemsize and holds_half(equation.outvars[0].aval):
            self.rounded.add(equation.outvars[0])
        return () if before.itemsize == after.itemsize and before != after else (0,)

    def _of_programs(
        self, equation: Equation, is_wanted: list[bool], weights: set[Any]
    ) -> Sequence[int]:
        found: set[int] = set()
        for program in subprograms(equation):
            if program.operands is None or program.role == "cond":
                continue
            wanted = list(is_wanted)
            is_weight = [_is_of_weights(equation.invars[i], weights) for i in program.operands]
            is_weight[program.carry] = [False] * program.carried
            while True:  # a loop carries from turn to turn
                reached = self.reached(program.body, wanted, is_weight)
                n = program.carried
                carried = [a or b for a, b in zip(wanted[:n], reached[program.carry], strict=True)]
                if carried == wanted[:n]:
                    break
                wanted[:n] = carried
            found |= {i for i, one in zip(program.operands, reached, strict=True) if one}
            is_wanted = wanted
        self.widened.update(
            variable for variable, one in zip(equation.outvars, is_wanted, strict=True) if one
        )
        return sorted(found)


def _of_weights(jaxpr: OpenJaxpr, is_weight: Sequence[bool]) -> set[Any]:
    """Returns the variables of a program that are computed from weights alone.

    Args:
      jaxpr: the program.
      is_weight: for each of its arguments, whether it is one.
    """
    weights = {v for v, one in zip(jaxpr.invars, is_weight, strict=True) if one}
    for equation in jaxpr.eqns:
        if equation.invars and all(_is_of_weights(x, weights) for x in equation.invars):
            weights.update(equation.outvars)
    return weights


def _is_of_weights(atom: Any, weights: set[Any]) -> bool:
    return isinstance(atom, Literal) or atom in weights


def _sums_nothing(equation: Equation) -> bool:
    """Returns whether an equation sums over axes of size 1: it transposes a broadcast of these."""
    return (
        equation.primitive.name == "reduce_sum"
        and equation.invars[0].aval.size == equation.outvars[0].aval.size
    )
