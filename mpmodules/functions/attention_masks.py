"""Attention masks that are known while tracing: their values, or the segment ids that they compare.

A mask that is built under `jax.jit` is a tracer. Its value is read from the equations that made it:
`flax.linen.make_causal_mask`, `make_attention_mask`, `combine_masks`, and `jax.numpy` alike. What
they compute from shapes alone is computed here, in NumPy. A comparison of a traced array along the
queries with one along the keys becomes a pair of segment ids.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array
Shape = tuple[int, ...]

_MOST_ELEMENTS = 2**28  # of a mask that is computed while tracing
_MOST_EQUATIONS = 256  # that are read for one mask
# The ids of padding: a query with the one matches no key, a key with the other no query.
_NO_KEY, _NO_QUERY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1


@dataclasses.dataclass(frozen=True)
class Segments:
    """Ids of queries and keys; a query attends to the keys with its own id.

    Attributes:
      query: (B..., T), int32.
      key: (B..., S), int32.
      reflexive: whether each query has the id of the key at its own position.
    """

    query: Array
    key: Array
    reflexive: bool


@dataclasses.dataclass(frozen=True)
class KnownMask:
    """A mask, as the conjunction of two.

    Attributes:
      static: (1 or N, T, S), bool; None keeps all pairs.
      segments: ids that have to agree, or None.
    """

    static: np.ndarray | None
    segments: Segments | None


def known_mask(mask: Any, query: Array, key: Array) -> KnownMask | None:
    """Reads a mask that broadcasts to (B..., N, T, S).

    Args:
      mask: False (or 0) masks a pair out; an array or a tracer.
      query: (B..., T, N, H).
      key: (B..., S, K, H).

    Returns:
      None where the mask is not known: it is traced and not made of shapes and of comparisons of
      queries' ids with keys', or its known part differs within the batch.
    """
    batch, lengths = query.shape[:-3], (query.shape[-3], key.shape[-3])
    rank = len(batch) + 3
    if np.ndim(mask) > rank:
        return None
    with np.errstate(all="ignore"):
        terms = _Reader().read(mask)
    added = rank - np.ndim(mask)
    source = (*[None] * added, *range(np.ndim(mask)))
    terms = tuple(_moved(term, source) for term in terms)
    arrays = [term != 0 for term in terms if isinstance(term, np.ndarray)]
    first = [array[(slice(1),) * len(batch)] for array in arrays]
    segments = _segments([term for term in terms if not isinstance(term, np.ndarray)], rank)
    if segments is None or any((x != one).any() for x, one in zip(arrays, first, strict=True)):
        return None
    allowed = [array.reshape(array.shape[-3:]) for array in first]
    static = None
    if not all(term.all() for term in allowed):
        together = functools.reduce(np.logical_and, allowed)
        static = np.broadcast_to(together, (len(together), *lengths))
    return KnownMask(static, _ids(segments, batch, lengths))


# --------------------------------------------------------------------------------------------------
# The equations of a mask
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Along:
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

    def moved(self, source: Sequence[int | None]) -> _Along:
        return _Along(self.array, tuple(None if at is None else self.axes[at] for at in source))


@dataclasses.dataclass(frozen=True)
class _Equal:
    """A comparison of two traced arrays along different axes."""

    left: _Along
    right: _Along


# A NumPy array has size 1 along the axes that it is the same along. A value of one array is its
# number; a value of several terms, or of a comparison, says only where all of them are true.
_Term: TypeAlias = np.ndarray | _Along | _Equal
_Value: TypeAlias = tuple[_Term, ...]
_TRUE = np.ones((), bool)


class _Reader:
    """Reads the values of tracers, each once."""

    def __init__(self) -> None:
        self._read: dict[int, _Value] = {}

    def read(self, x: Any) -> _Value:
        if not isinstance(x, Tracer):
            # An array of several processes has no value here.
            is_here = getattr(x, "is_fully_addressable", True)
            return (np.asarray(x),) if is_here else _leaf(x)
        if id(x) not in self._read:
            self._read[id(x)] = self._computed(x) or _leaf(x)
        return self._read[id(x)]

    def _computed(self, x: Any) -> _Value | None:
        # The equation that made a tracer is known to the traces of `jax.jit` alone.
        equation = getattr(x, "parent", None)
        if equation is None:
            lowered = x.full_lower() if hasattr(x, "full_lower") else x
            return None if isinstance(lowered, Tracer) else self.read(lowered)
        if len(self._read) > _MOST_EQUATIONS or not hasattr(equation, "in_tracers"):
            return None
        name, shape = equation.primitive.name, x.shape
        self._read[id(x)] = _leaf(x)  # counts it
        if name not in _KNOWN:
            return None
        inputs = [self.read(operand) for operand in equation.in_tracers]
        shapes = [np.shape(operand) for operand in equation.in_tracers]
        if name in _CALLS:
            place = [var is x.val for var in equation.outvars].index(True)
            results = _run(equation.params["jaxpr"], inputs)
            return None if results is None else results[place]
        return _apply(name, equation.params, inputs, shapes, shape)


def _leaf(x: Any) -> _Value:
    return (_Along(x, tuple(at if size != 1 else None for at, size in enumerate(x.shape))),)


def _run(closed: Any, inputs: Sequence[_Value]) -> list[_Value] | None:
    """Evaluates the program of a jitted function; None where it holds an unknown equation."""
    jaxpr, constants = closed.jaxpr, [(np.asarray(x),) for x in closed.consts]
    values: dict[Any, _Value] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        return (np.asarray(atom.val),) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        name, shapes = equation.primitive.name, [atom.aval.shape for atom in equation.invars]
        if name in _CALLS:
            results = _run(equation.params["jaxpr"], operands)
        else:
            made = _apply(name, equation.params, operands, shapes, equation.outvars[0].aval.shape)
            results = made and [made]
        if results is None:
            return None
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _apply(
    name: str, params: Any, inputs: Sequence[_Value], shapes: Sequence[Shape], shape: Shape
) -> _Value | None:
    """Evaluates an equation; None where it is not known how."""
    if name in _MOVES:
        source = _MOVES[name](params, shapes[0], shape)
        if source is not None:
            return tuple(_moved(_of_rank(term, len(shapes[0])), source) for term in inputs[0])
    numbers = [value[0] for value in inputs if len(value) == 1]
    arrays = [number for number in numbers if isinstance(number, np.ndarray)]
    if len(arrays) == len(inputs):
        return _computed(name, params, arrays, shapes, shape)
    if name == "eq":
        pair = [number for number in numbers if isinstance(number, _Along)]
        is_pair = len(pair) == 2 and pair[0].used - pair[1].used and pair[1].used - pair[0].used
        return (_Equal(*pair),) if is_pair else None
    rank = len(shape)
    if name in ("and", "mul"):
        return tuple(_of_rank(term, rank) for value in inputs for term in value)
    if name == "ne" and len(inputs[1]) == 1 and _is_false(inputs[1][0]):
        return (_TRUE.reshape((1,) * rank), *inputs[0])
    if name == "convert_element_type":
        is_number = len(numbers) == 1 and not isinstance(numbers[0], _Equal)
        return None if is_number else inputs[0]
    if name == "select_n" and len(inputs) == 3 and len(inputs[1]) == 1 and _is_false(inputs[1][0]):
        return tuple(_of_rank(term, rank) for value in (inputs[0], inputs[2]) for term in value)
    return None


def _is_false(term: _Term) -> bool:
    return isinstance(term, np.ndarray) and not term.any()


def _computed(
    name: str, params: Any, arrays: Sequence[np.ndarray], shapes: Sequence[Shape], shape: Shape
) -> _Value | None:
    if name == "iota":
        along = [1] * len(shape)
        along[params["dimension"]] = -1
        return (np.arange(shape[params["dimension"]], dtype=params["dtype"]).reshape(along),)
    if name == "reshape":
        if math.prod(shape) > _MOST_ELEMENTS:
            return None
        return (np.broadcast_to(arrays[0], shapes[0]).reshape(shape),)
    if name == "convert_element_type":
        return (arrays[0].astype(params["new_dtype"]),)
    if name not in _NUMPY or math.prod(np.broadcast_shapes(*(x.shape for x in arrays))) > (
        _MOST_ELEMENTS
    ):
        return None
    return (np.asarray(_NUMPY[name](*arrays)),)


def _of_rank(term: _Term, rank: int) -> _Term:
    """Gives a scalar among arrays the rank of the others."""
    if isinstance(term, np.ndarray) and term.ndim < rank:
        return term.reshape((1,) * (rank - term.ndim) + term.shape)
    return term


def _moved(term: _Term, source: Sequence[int | None]) -> _Term:
    """Returns a term with other axes: of each new axis, the old one, or None for a size of 1."""
    if isinstance(term, _Equal):
        return _Equal(term.left.moved(source), term.right.moved(source))
    if isinstance(term, _Along):
        return term.moved(source)
    order = [at for at in source if at is not None]
    dropped = [at for at in range(term.ndim) if at not in order]  # of size 1
    shape = [1 if at is None else term.shape[at] for at in source]
    return term.transpose(*dropped, *order).reshape(shape)


def _broadcast(params: Any, _: Shape, shape: Shape) -> list[int | None]:
    places = params["broadcast_dimensions"]
    return [places.index(at) if at in places else None for at in range(len(shape))]


def _reshaped(_: Any, old: Shape, shape: Shape) -> list[int | None] | None:
    """Returns the old axis of each new one, where only axes of size 1 come and go."""
    kept = [at for at, size in enumerate(old) if size != 1]
    if [old[at] for at in kept] != [size for size in shape if size != 1]:
        return None
    order = iter(kept)
    return [None if size == 1 else next(order) for size in shape]


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
    **dict.fromkeys(("pvary", "copy"), lambda _, old, __: list(range(len(old)))),
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
_KNOWN = {*_CALLS, *_MOVES, *_NUMPY, "iota", "convert_element_type"}


# --------------------------------------------------------------------------------------------------
# Segment ids
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Traced:
    """The traced terms of a mask: ids to compare, valid queries and valid keys.

    `compared` is empty, or has the ids of queries and those of keys.
    """

    compared: Sequence[_Along] = ()
    queries: list[_Along] = dataclasses.field(default_factory=list)
    keys: list[_Along] = dataclasses.field(default_factory=list)


def _segments(terms: Sequence[_Along | _Equal], rank: int) -> _Traced | None:
    """Sorts terms. Returns None where one is none of these, or two pairs of ids are compared."""
    heads, queries, keys = rank - 3, rank - 2, rank - 1
    found = _Traced()
    for term in terms:
        sides = [term] if isinstance(term, _Along) else [term.left, term.right]
        if any(heads in side.used or {queries, keys} <= side.used for side in sides):
            return None
        if isinstance(term, _Along):
            (found.keys if keys in term.used else found.queries).append(term)
            continue
        pair = sides if keys in term.right.used else sides[::-1]
        if queries not in pair[0].used or keys not in pair[1].used:
            return None
        if any(not _is_id(side.array.dtype) for side in pair):
            return None
        if found.compared and not all(map(_same, found.compared, pair)):
            return None
        found.compared = pair
    return found


def _is_id(dtype: Any) -> bool:
    """Returns whether numbers of a dtype are different in int32 where they are different."""
    return jnp.issubdtype(dtype, np.integer) and dtype.itemsize <= 4


def _same(one: _Along, other: _Along) -> bool:
    return one.array is other.array and one.axes == other.axes


def _ids(traced: _Traced, batch: Shape, lengths: tuple[int, int]) -> Segments | None:
    compared, padded = traced.compared, (traced.queries, traced.keys)
    if not compared and not any(padded):
        return None
    ids = []
    for side, padding in enumerate((_NO_KEY, _NO_QUERY)):
        place, shape = len(batch) + 1 + side, (*batch, lengths[side])
        found = jnp.ones(shape, jnp.int32)
        if compared:
            found = _spread(compared[side], place, shape).astype(jnp.int32)
        for valid in padded[side]:
            found = jnp.where(_spread(valid, place, shape).astype(bool), found, jnp.int32(padding))
        ids.append(found)
    is_own = lengths[0] == lengths[1] and len({id(side.array) for side in compared}) == 1
    return Segments(*ids, reflexive=is_own and not any(padded))


def _spread(term: _Along, place: int, shape: Shape) -> Array:
    """Returns a traced array of queries or keys as (B..., T or S): `place` is their axis."""
    kept = (*range(len(shape) - 1), place)
    axes = [term.axes[at] for at in kept]
    order = [axis for axis in axes if axis is not None]
    dropped = [axis for axis in range(term.array.ndim) if axis not in order]  # of size 1
    moved = jnp.transpose(term.array, (*dropped, *order))
    sizes = [1 if axis is None else term.array.shape[axis] for axis in axes]
    return jnp.broadcast_to(moved.reshape(sizes), shape)
