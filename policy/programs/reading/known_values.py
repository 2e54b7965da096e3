"""Values of tracers that are known while tracing, read from the equations that made them.

What a traced program computes from shapes and constants alone is computed here, in NumPy. What it
computes of traced arrays is known as far as a mask goes: as arrays along some of its axes, and
comparisons of two of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array
Shape = tuple[int, ...]

_MOST_ELEMENTS = 2**28  # of an array that is computed while tracing
_MOST_EQUATIONS = 256  # that are read for one


def known_terms(x: Any) -> tuple[Term, ...]:
    """Returns terms that are all true (or nonzero) exactly where an array is.

    Args:
      x: an array or a tracer.

    Returns:
      NumPy arrays, of size 1 along the axes that the array is the same along; traced arrays along
      some of its axes; and comparisons of two of these. Of an array of which nothing is known it is
      the array itself.
    """
    with np.errstate(all="ignore"):
        return _Reader().read(x)


@dataclasses.dataclass(frozen=True)
class Along:
    """A traced array along some axes of a mask, and the same along the others.

    Attributes:
      array: traced.
      axes: of each axis of the mask, the array's axis, or None.
    """

    array: Array
    axes: tuple[int | None, ...]

    @property
    def used(self) -> frozenset[int]:
        return frozenset(at for at, axis in enumerate(self.axes) if axis is not None)

    def with_axes(self, source: Sequence[int | None]) -> Along:
        return Along(self.array, tuple(None if at is None else self.axes[at] for at in source))


@dataclasses.dataclass(frozen=True)
class Equal:
    """A comparison of two traced arrays along different axes."""

    left: Along
    right: Along


# A NumPy array has size 1 along the axes that it is the same along. A value of one array is its
# number; a value of several terms, or of a comparison, says only where all of them are true.
Term: TypeAlias = np.ndarray | Along | Equal
Terms: TypeAlias = tuple[Term, ...]


class _Reader:
    """Reads the values of tracers, each once."""

    def __init__(self) -> None:
        self._read: dict[int, Terms] = {}

    def read(self, x: Any) -> Terms:
        if not isinstance(x, Tracer):
            # An array of several processes has no value here.
            is_here = getattr(x, "is_fully_addressable", True)
            return (np.asarray(x),) if is_here else _leaf(x)
        if id(x) not in self._read:
            self._read[id(x)] = self._computed(x) or _leaf(x)
        return self._read[id(x)]

    def _computed(self, x: Any) -> Terms | None:
        # The equation that made a tracer is known to the traces of `jax.jit` alone.
        equation = getattr(x, "parent", None)
        if equation is None:
            outer = x.get_referent() if hasattr(x, "get_referent") else x  # if it is closed over
            if outer is not x:
                return self.read(outer)
            lowered = x.full_lower() if hasattr(x, "full_lower") else x
            return None if isinstance(lowered, Tracer) else self.read(lowered)
        if len(self._read) > _MOST_EQUATIONS or not hasattr(equation, "in_tracers"):
            return None
        name = equation.primitive.name
        self._read[id(x)] = _leaf(x)  # counts it
        if name not in _KNOWN:
            return None
        inputs = [self.read(operand) for operand in equation.in_tracers]
        shapes = [np.shape(operand) for operand in equation.in_tracers]
        if name in _CALLS:
            place = [var is x.val for var in equation.outvars].index(True)
            results = _run(equation.params["jaxpr"], inputs)
            return None if results is None else results[place]
        return _apply(name, equation.params, inputs, shapes, x.aval)


def _leaf(x: Any) -> Terms:
    return (Along(x, tuple(at if size != 1 else None for at, size in enumerate(x.shape))),)


def _run(closed: Any, inputs: Sequence[Terms]) -> list[Terms] | None:
    """Evaluates the program of a jitted function; None where it holds an unknown equation."""
    jaxpr, constants = closed.jaxpr, [(np.asarray(x),) for x in closed.consts]
    values: dict[Any, Terms] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> Terms:
        return (np.asarray(atom.val),) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        name, shapes = equation.primitive.name, [atom.aval.shape for atom in equation.invars]
        if name in _CALLS:
            results = _run(equation.params["jaxpr"], operands)
        else:
            made = _apply(name, equation.params, operands, shapes, equation.outvars[0].aval)
            results = made and [made]
        if results is None:
            return None
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _apply(
    name: str, params: Any, inputs: Sequence[Terms], shapes: Sequence[Shape], aval: Any
) -> Terms | None:
    """Evaluates an equation; None where it is not known how."""
    if name in _MOVES:
        source = _MOVES[name](params, shapes[0], aval.shape)
        if source is not None and all(_used(x, len(shapes[0])) <= {*source} for x in inputs[0]):
            return tuple(with_axes(_of_rank(term, len(shapes[0])), source) for term in inputs[0])
    numbers = [value[0] for value in inputs if len(value) == 1]
    arrays = [number for number in numbers if isinstance(number, np.ndarray)]
    if len(arrays) < len(inputs):
        return _TRUTHS[name](inputs, aval) if name in _TRUTHS else None
    size = math.prod(np.broadcast_shapes(*(x.shape for x in arrays)))
    if name in _MAKERS:
        size = math.prod(aval.shape) if name in _MOVES else size
        return None if size > _MOST_ELEMENTS else (_MAKERS[name](params, arrays, shapes, aval),)
    if name not in _NUMPY or size > _MOST_ELEMENTS:
        return None
    return (np.asarray(_NUMPY[name](*arrays)),)


def _of_rank(term: Term, rank: int) -> Term:
    """Gives a scalar among arrays the rank of the others."""
    if isinstance(term, np.ndarray) and term.ndim < rank:
        return term.reshape((1,) * (rank - term.ndim) + term.shape)
    return term


def _used(term: Term, rank: int) -> set[int]:
    """Returns the axes that a term is not the same along."""
    if isinstance(term, Equal):
        return {*term.left.used, *term.right.used}
    if isinstance(term, Along):
        return {*term.used}
    return {at + rank - term.ndim for at, size in enumerate(term.shape) if size != 1}


def with_axes(term: Term, source: Sequence[int | None]) -> Term:
    """Returns a term with other axes: of each new axis, the old one, or None for a size of 1."""
    if isinstance(term, Equal):
        return Equal(term.left.with_axes(source), term.right.with_axes(source))
    if isinstance(term, Along):
        return term.with_axes(source)
    order = [at for at in source if at is not None]
    dropped = [at for at in range(term.ndim) if at not in order]  # of size 1
    shape = [1 if at is None else term.shape[at] for at in source]
    return term.transpose(*dropped, *order).reshape(shape)


# --------------------------------------------------------------------------------------------------
# Where a result is true
# --------------------------------------------------------------------------------------------------


def _all_of(inputs: Sequence[Terms], aval: Any) -> Terms:
    """Returns where all inputs are true. A product of masks is taken not to overflow or vanish."""
    return tuple(_of_rank(term, len(aval.shape)) for value in inputs for term in value)


def _all_of_booleans(inputs: Sequence[Terms], aval: Any) -> Terms | None:
    return _all_of(inputs, aval) if aval.dtype == bool else None  # of integers it is by bits


def _equal(inputs: Sequence[Terms], _: Any) -> Terms | None:
    pair = [value[0] for value in inputs if len(value) == 1 and isinstance(value[0], Along)]
    is_pair = len(pair) == 2 and pair[0].used - pair[1].used and pair[1].used - pair[0].used
    return (Equal(*pair),) if is_pair else None


def _not_zero(inputs: Sequence[Terms], aval: Any) -> Terms | None:
    whole = np.ones((1,) * len(aval.shape), bool)
    return (whole, *inputs[0]) if _is_false(inputs[1]) else None


def _converted(inputs: Sequence[Terms], aval: Any) -> Terms | None:
    (value,) = inputs
    if len(value) == 1 and not isinstance(value[0], Equal):
        return None  # a number
    traced = [term.array for term in value if isinstance(term, Along)]
    has_floats = any(jnp.issubdtype(array.dtype, np.floating) for array in traced)
    is_truncated = has_floats and jnp.issubdtype(aval.dtype, np.integer)
    return None if is_truncated else value


def _selected(inputs: Sequence[Terms], aval: Any) -> Terms | None:
    which, *cases = inputs
    is_conjunction = len(cases) == 2 and _is_false(cases[0])
    return _all_of([which, cases[1]], aval) if is_conjunction else None


def _is_false(value: Terms) -> bool:
    return len(value) == 1 and isinstance(value[0], np.ndarray) and not value[0].any()


# --------------------------------------------------------------------------------------------------
# Primitives
# --------------------------------------------------------------------------------------------------


def _broadcast(params: Any, _: Shape, shape: Shape) -> list[int | None]:
    places = params["broadcast_dimensions"]
    return [places.index(at) if at in places else None for at in range(len(shape))]


def _reshaped(_: Any, old: Shape, shape: Shape) -> list[int | None] | None:
    """Returns the old axis of each new one; None for axes of size 1, split axes and merged ones."""
    source: list[int | None] = [None] * len(shape)
    at, to, before, after = 0, 0, 1, 1  # sizes of what is read of the axes that are merged or split
    while at < len(old) and to < len(shape):
        is_aligned = before == after
        if is_aligned and old[at] == shape[to]:
            source[to] = at
            at, to = at + 1, to + 1
        elif not (isinstance(old[at], int) and isinstance(shape[to], int)):  # of `jax.export`
            return None
        elif before < after or (is_aligned and shape[to] != 1):
            before, at = before * old[at], at + 1
        else:
            after, to = after * shape[to], to + 1
    return source


def _iota(params: Any, aval: Any) -> np.ndarray:
    along = [1] * len(aval.shape)
    along[params["dimension"]] = -1
    return np.arange(aval.shape[params["dimension"]], dtype=aval.dtype).reshape(along)


def _truncated(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    quotient = left / right
    is_whole = np.issubdtype(left.dtype, np.integer)
    return np.trunc(quotient).astype(left.dtype) if is_whole else quotient


_CALLS = ("jit", "pjit")
_MOVES: dict[str, Callable[[Any, Shape, Shape], list[int | None] | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "transpose": lambda params, *_: list(params["permutation"]),
    "pvary": lambda _, old, __: list(range(len(old))),
    "copy": lambda _, old, __: list(range(len(old))),
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "rem": np.fmod,
    "div": _truncated,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
}
_MAKERS: dict[str, Callable[[Any, Any, Any, Any], np.ndarray]] = {
    "iota": lambda params, _, __, aval: _iota(params, aval),
    "reshape": lambda _, arrays, old, aval: np.broadcast_to(arrays[0], old[0]).reshape(aval.shape),
    "convert_element_type": lambda params, arrays, _, __: arrays[0].astype(params["new_dtype"]),
}
_TRUTHS: dict[str, Callable[[Sequence[Terms], Any], Terms | None]] = {
    "eq": _equal,
    "and": _all_of_booleans,
    "mul": _all_of,
    "ne": _not_zero,
    "convert_element_type": _converted,
    "select_n": _selected,
}
_KNOWN = {*_CALLS, *_MOVES, *_NUMPY, *_MAKERS}
