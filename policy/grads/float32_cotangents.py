"""Evaluates a program with half-precision values read through casts of their own, so that cotangents sum in float32.

JAX adds up the cotangents of a value in that value's dtype. Here such a value is carried as the float32 one that it was
cast from, and is cast at each use: the same values forward, float32 sums backward. What only moves data (reshape,
broadcast, slice, gather) moves the float32 value, so that the gradients of a bias and of an embedding are float32 sums
too. Bodies of `jit`, `scan`, `cond` and `checkpoint` are evaluated alike. Operands of `custom_vjp`, `custom_jvp`,
`while`, a jit with shardings of its own and other primitives with a body are cast before them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal, Var

from policy._jaxpr.broadcasting import product, repeated, sharding_of
from policy._jaxpr.paths import REGION
from policy._jaxpr.primitives import MOVES_COTANGENTS, NARY, PRODUCTS
from policy._jaxpr.subprograms import programs_of

READ = f"{REGION}parameter_read"
"""The name on JAX's stack of a cast that stands for the read of a parameter: its operand is carried on as it is."""


@dataclasses.dataclass(frozen=True)
class Wide:
    """A float32 value that stands for a half-precision one, and is cast to it at each use.

    Attributes:
      value: the float32 (or float64) array.
      dtype: the half dtype.
      is_exact: whether `value` is what the half one widened would be; else code that widens it sees it rounded.
    """

    value: Any
    dtype: Any
    is_exact: bool = True


def read(x: Any) -> Any:
    """Returns a wide value as the half one that it stands for; others as they are."""
    return x.value.astype(x.dtype) if isinstance(x, Wide) else x


MOVING_JITS: dict[str, Callable[[jax.Array], jax.Array]] = {}
"""Jitted functions, by name, that only move their one argument: what to call on a float32 value that stands for it."""


def evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr whose inputs, and whose reads of parameters, may be wide.

    Args:
      jaxpr: an open or closed jaxpr.
      inputs: arrays, or `Wide` ones where the jaxpr has half ones.
    """
    consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    # jax 0.12 made one class of open and closed jaxprs: the constants are its leading inputs
    variables = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(variables, [*consts, *inputs], strict=True))
    for equation in jaxpr.eqns:
        operands = [_value(x, values) for x in equation.invars]
        names = source_info_util.current_name_stack() + equation.source_info.name_stack
        with source_info_util.user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
            results = _apply(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [_value(x, values) for x in jaxpr.outvars]


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _apply(equation: Any, operands: list[Any]) -> list[Any]:
    name, is_wide = equation.primitive.name, [isinstance(x, Wide) for x in operands]
    if any(is_wide):
        first = operands[0]
        if name in MOVES_COTANGENTS and is_wide[0] and not any(is_wide[1:]):
            moved = _bind(equation, [first.value, *operands[1:]])
            return [dataclasses.replace(first, value=x) for x in moved]
        if name == "concatenate" and all(is_wide) and len({x.dtype for x in operands}) == 1:
            is_exact = all(x.is_exact for x in operands)
            return [Wide(x, first.dtype, is_exact) for x in _bind(equation, [x.value for x in operands])]
        if name in NARY and _repeats_wide(equation, is_wide):
            return [_repeating(equation, operands, is_wide)]
        if name == "convert_element_type" and first.is_exact and _itemsize(equation.params["new_dtype"]) >= 4:
            return _bind(equation, [first.value])
    elif is_read(equation):
        return [Wide(operands[0], equation.params["new_dtype"], is_exact=False)]
    if name in _RECURSED and (any(is_wide) or any(map(_has_reads, programs_of(equation)))):
        results = _RECURSED[name](equation, operands)
        if results is not None:
            return results
    return _bind(equation, [read(x) for x in operands])


def _is_repeated(atom: Any, is_wide: bool, result: Any) -> bool:
    return is_wide and atom.aval.ndim > 0 and atom.aval.shape != result.aval.shape


def _repeats_wide(equation: Any, is_wide: list[bool]) -> bool:
    pairs = zip(equation.invars, is_wide, strict=True)
    return any(_is_repeated(atom, wide, equation.outvars[0]) for atom, wide in pairs)


def _repeating(equation: Any, operands: list[Any], is_wide: list[bool]) -> Any:
    """Applies an elementwise operation that broadcasts axes of size 1 of wide operands."""
    result = equation.outvars[0]
    if equation.primitive.name in PRODUCTS:
        dtype = result.aval.dtype
        a, b = (
            x.value if _is_repeated(atom, wide, result) else read(x)
            for atom, wide, x in zip(equation.invars, is_wide, operands, strict=True)
        )
        return product(equation, a, b, dtype)
    arrays = [
        repeated(x.value, result.aval.shape, x.dtype, sharding_of(equation))
        if _is_repeated(atom, wide, result)
        else read(x)
        for atom, wide, x in zip(equation.invars, is_wide, operands, strict=True)
    ]
    (output,) = _bind(equation, arrays)
    return output


def is_read(equation: Any) -> bool:
    """Returns whether an equation is the cast that stands for the read of a parameter."""
    if equation.primitive.name != "convert_element_type" or not isinstance(equation.invars[0], Var):
        return False
    innermost = re.split("[/(]", str(equation.source_info.name_stack).rstrip(")"))[-1]
    return innermost == READ and _itemsize(equation.params["new_dtype"]) < _itemsize(equation.invars[0].aval.dtype)


@functools.lru_cache(maxsize=4096)
def _has_reads(program: Any) -> bool:
    return any(is_read(e) or any(map(_has_reads, programs_of(e))) for e in program.eqns)


def _itemsize(dtype: Any) -> int:
    return np.dtype(dtype).itemsize


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


Kind = tuple[Any, bool] | None
"""The dtype that a wide value stands for, and whether it is exact; None of other values."""


def _split(operands: Sequence[Any]) -> tuple[list[Any], tuple[Kind, ...]]:
    """Returns operands as arrays, and the kind of each."""
    arrays = [x.value if isinstance(x, Wide) else x for x in operands]
    return arrays, tuple((x.dtype, x.is_exact) if isinstance(x, Wide) else None for x in operands)


def _join(arrays: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    return [x if kind is None else Wide(x, *kind) for x, kind in zip(arrays, kinds, strict=True)]


# Each of the following evaluates the body of one kind of equation, or returns None: then the equation runs as it is.


@functools.lru_cache(maxsize=1024)
def _jitted(jaxpr: Any, kinds: tuple[Kind, ...], name: str) -> tuple[Callable[..., Any], list[Any]]:
    """One jitted function for each traced body, so that a call outside of any jit compiles it once."""
    returned: list[Any] = []

    def body(*arrays: Any) -> list[Any]:
        results, returned[:] = _split(evaluate(jaxpr, _join(arrays, kinds)))
        return results

    body.__name__ = name
    return jax.jit(body), returned


def _jit(equation: Any, operands: list[Any]) -> list[Any] | None:
    move = MOVING_JITS.get(equation.params["name"])
    if move is not None and isinstance(operands[0], Wide):
        return [dataclasses.replace(operands[0], value=move(operands[0].value))]
    shardings = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None  # a jit made anew would lose them
    arrays, kinds = _split(operands)
    body, returned = _jitted(equation.params["jaxpr"], kinds, equation.params["name"])
    results = body(*arrays)
    return _join(results, returned)


def _checkpoint(equation: Any, operands: list[Any]) -> list[Any] | None:
    params = equation.params
    if params["differentiated"]:
        return None
    arrays, kinds = _split(operands)

    def body(*arrays: Any) -> list[Any]:
        return [read(x) for x in evaluate(params["jaxpr"], _join(arrays, kinds))]

    return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*arrays)


def _scan(equation: Any, operands: list[Any]) -> list[Any]:
    params, jaxpr = equation.params, equation.params["jaxpr"]
    # Counted by rank: what is scanned over has one axis more outside; the parameters that say so differ in jax 0.12.
    scanned_count = sum(x.aval.ndim > inner.ndim for x, inner in zip(equation.invars, jaxpr.in_avals, strict=True))
    carries = sum(x.aval.ndim == inner.ndim for x, inner in zip(equation.outvars, jaxpr.out_avals, strict=True))
    consts = len(operands) - carries - scanned_count
    start = [read(x) for x in operands[consts : consts + carries]]  # a carry is new each turn: it keeps its dtype
    constants, constant_kinds = _split(operands[:consts])
    scanned, scanned_kinds = _split(operands[consts + carries :])

    def body(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [*_join(constants, constant_kinds), *carry, *_join(sliced, scanned_kinds)]
        results = [read(x) for x in evaluate(jaxpr, inputs)]
        return results[:carries], results[carries:]

    end, stacked = lax.scan(
        body,
        start,
        scanned,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return [*end, *stacked]


def _cond(equation: Any, operands: list[Any]) -> list[Any] | None:
    if equation.params.get("branches_platforms") is not None:
        return None  # one branch for each platform, chosen when lowered
    arrays, kinds = _split(operands[1:])

    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        return lambda *arrays: [read(x) for x in evaluate(jaxpr, _join(arrays, kinds))]

    return lax.switch(operands[0], [branch(jaxpr) for jaxpr in equation.params["branches"]], *arrays)


_RECURSED: dict[str, Callable[[Any, list[Any]], list[Any] | None]] = {
    "jit": _jit,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
}
