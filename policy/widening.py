"""Gradients of half-precision parameters, accumulated over their uses in float32.

JAX adds up the cotangents of a value in that value's dtype: a bfloat16 parameter that is used 64 times gets its 64
contributions added in bfloat16. Casting the parameter up and once down again doesn't help, because the sum then forms
behind that one cast. So the loss is traced in the dtypes it was written for, and evaluated with each use of such a
parameter reading the float32 copy through a cast of its own: the same values forward, float32 sums backward.

It reaches every use in `jit`, `scan`, `cond` and `checkpoint`, and looks through what only moves data (reshape,
transpose, broadcast, slice, gather: so an embedding's or a bias's gradient is a float32 sum too). It ends where a rule
is someone else's: inside `custom_vjp`, `custom_jvp`, `while`, a jit with shardings of its own and other primitives with
a body, cotangents add up in the parameter's dtype. The sum within one use, a matmul's, is the backend's: float32
accumulation, rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal

from policy.trees import is_overwritten


def widened_value_and_grad(function: Callable[..., Any], argnums: int | Sequence[int]) -> Callable[..., Any]:
    """`jax.value_and_grad(function, argnums, has_aux=True)`, with float32 gradients for half-precision leaves."""

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        chosen = tuple(args[position] for position in positions)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(chosen)
        leaves = [leaf for _, leaf in with_paths]
        narrow = [not is_overwritten(path) and _is_half(leaf) for path, leaf in with_paths]
        if not any(narrow):
            return jax.value_and_grad(function, argnums, has_aux=True)(*args, **kwargs)

        def of_leaves(*leaves: Any) -> Any:
            full = list(args)
            for position, value in zip(positions, jax.tree.unflatten(treedef, leaves), strict=True):
                full[position] = value
            return function(*full, **kwargs)

        traced, rebuild = _trace(of_leaves, leaves)

        def of_wide_leaves(wide: list[Any]) -> Any:
            inputs = [_Wide(w, leaf.dtype) if n else w for w, leaf, n in zip(wide, leaves, narrow, strict=True)]
            return rebuild([_read(x) for x in _evaluate(traced, inputs)])

        wide = [leaf.astype(jnp.float32) if n else leaf for leaf, n in zip(leaves, narrow, strict=True)]
        value, gradients = jax.value_and_grad(of_wide_leaves, has_aux=True)(wide)
        gradients = jax.tree.unflatten(treedef, gradients)
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return differentiated


def _is_half(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4


def _trace(function: Callable[..., Any], leaves: list[Any]) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The jaxpr of `function`, and what rebuilds its output from the jaxpr's: aux may hold what is no array."""
    found: list[Any] = []

    def arrays_of(*leaves: Any) -> list[Any]:
        flat, treedef = jax.tree.flatten(function(*leaves))
        is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)) for x in flat]
        others = [None if a else x for x, a in zip(flat, is_array, strict=True)]
        found[:] = [treedef, is_array, others]
        return [x for x, a in zip(flat, is_array, strict=True) if a]

    traced = jax.make_jaxpr(arrays_of)(*leaves)

    def rebuild(arrays: list[Any]) -> Any:
        treedef, is_array, others = found
        remaining = iter(arrays)
        return jax.tree.unflatten(treedef, [next(remaining) if a else x for x, a in zip(others, is_array, strict=True)])

    return traced, rebuild


@dataclasses.dataclass(frozen=True)
class _Wide:
    """A float32 value that stands for a half-precision one, and is cast to it at each use."""

    value: Any
    dtype: Any


def _read(x: Any) -> Any:
    return x.value.astype(x.dtype) if isinstance(x, _Wide) else x


# What only moves data, by name: its first operand may stay wide, and the sum of its cotangents is then float32.
_MOVES = frozenset(
    ["reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "gather", "rev"]
)

MOVING_JITS: dict[str, Callable[[jax.Array], jax.Array]] = {}
"""Jitted functions, by name, that only move their one argument: what to call on a float32 value that stands for it."""


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
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
    name = equation.primitive.name
    if any(isinstance(x, _Wide) for x in operands):
        first = operands[0]
        if name in _MOVES and isinstance(first, _Wide) and not any(isinstance(x, _Wide) for x in operands[1:]):
            moved = _bind(equation, [first.value, *operands[1:]])
            return [_Wide(x, first.dtype) for x in moved]
        if name == "convert_element_type" and np.dtype(equation.params["new_dtype"]).itemsize >= 4:
            return _bind(equation, [first.value])
        if name in _RECURSED and (results := _RECURSED[name](equation, operands)) is not None:
            return results
    return _bind(equation, [_read(x) for x in operands])


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def _split(operands: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Operands as arrays, and for each the dtype that it stands for, or None."""
    arrays = [x.value if isinstance(x, _Wide) else x for x in operands]
    return arrays, tuple(x.dtype if isinstance(x, _Wide) else None for x in operands)


def _join(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x if d is None else _Wide(x, d) for x, d in zip(arrays, dtypes, strict=True)]


# Each of these evaluates the body of one kind of equation, or returns None: then the equation runs as it is.


@functools.lru_cache(maxsize=1024)
def _jitted(jaxpr: Any, dtypes: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """One jitted function for each traced body, so that a call outside of any jit compiles it once."""
    returned: list[Any] = []

    @jax.jit
    def body(*arrays: Any) -> list[Any]:
        results, returned[:] = _split(_evaluate(jaxpr, _join(arrays, dtypes)))
        return results

    return body, returned


def _jit(equation: Any, operands: list[Any]) -> list[Any] | None:
    if (move := MOVING_JITS.get(equation.params["name"])) is not None:
        return [_Wide(move(operands[0].value), operands[0].dtype)]
    shardings = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None  # a jit made anew would lose them
    arrays, dtypes = _split(operands)
    body, returned = _jitted(equation.params["jaxpr"], dtypes)
    results = body(*arrays)
    return _join(results, returned)


def _checkpoint(equation: Any, operands: list[Any]) -> list[Any] | None:
    params = equation.params
    if params["differentiated"]:
        return None
    arrays, dtypes = _split(operands)

    def body(*arrays: Any) -> list[Any]:
        return [_read(x) for x in _evaluate(params["jaxpr"], _join(arrays, dtypes))]

    return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*arrays)


def _scan(equation: Any, operands: list[Any]) -> list[Any]:
    params, jaxpr = equation.params, equation.params["jaxpr"]
    # Counted by rank: what is scanned over has one axis more outside; the parameters that say so differ in jax 0.12.
    scanned_count = sum(x.aval.ndim > inner.ndim for x, inner in zip(equation.invars, jaxpr.in_avals, strict=True))
    carries = sum(x.aval.ndim == inner.ndim for x, inner in zip(equation.outvars, jaxpr.out_avals, strict=True))
    consts = len(operands) - carries - scanned_count
    start = [_read(x) for x in operands[consts : consts + carries]]  # a carry is new each turn: it keeps its dtype
    constants, constant_dtypes = _split(operands[:consts])
    scanned, scanned_dtypes = _split(operands[consts + carries :])

    def body(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [*_join(constants, constant_dtypes), *carry, *_join(sliced, scanned_dtypes)]
        results = [_read(x) for x in _evaluate(jaxpr, inputs)]
        return results[:carries], results[carries:]

    end, stacked = lax.scan(
        body, start, scanned, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*end, *stacked]


def _cond(equation: Any, operands: list[Any]) -> list[Any] | None:
    if equation.params.get("branches_platforms") is not None:
        return None  # one branch for each platform, chosen when lowered
    arrays, dtypes = _split(operands[1:])

    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        return lambda *arrays: [_read(x) for x in _evaluate(jaxpr, _join(arrays, dtypes))]

    return lax.switch(operands[0], [branch(jaxpr) for jaxpr in equation.params["branches"]], *arrays)


_RECURSED: dict[str, Callable[[Any, list[Any]], list[Any] | None]] = {
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
}
