"""Gradients of half-precision parameters, accumulated over their uses in float32.

JAX adds up the cotangents of a value in that value's dtype: a bfloat16 parameter that is used 64 times gets its 64
contributions added in bfloat16. Casting the parameter up and once down again doesn't help, because the sum then forms
behind that one cast. So the loss is traced in the dtypes it was written for, and evaluated with each use of such a
parameter reading the float32 copy through a cast of its own: the same values forward, float32 sums backward.

It reaches every use in `jit`, `scan`, `cond` and `checkpoint`, and looks through what only moves data (reshape,
transpose, broadcast, slice, gather: so an embedding's or a bias's gradient is a float32 sum too). It ends where a rule is
someone else's: inside `custom_vjp`, `custom_jvp`, `while` and primitives with a body of their own, cotangents add up in the
parameter's dtype. The sum within one use, a matmul's, is the backend's: float32 accumulation, rounded once.
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
from jax.extend import core as jex

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
            return rebuild([_read(x) for x in _evaluate(traced.jaxpr, traced.consts, inputs)])

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
        return jax.tree.unflatten(
            treedef, [next(remaining) if a else x for x, a in zip(others, is_array, strict=True)]
        )

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


def _evaluate(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = {}
    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        operands = [x.val if isinstance(x, jex.Literal) else values[x] for x in equation.invars]
        with jax.named_scope(str(equation.source_info.name_stack)):
            results = _apply(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [x.val if isinstance(x, jex.Literal) else values[x] for x in jaxpr.outvars]


def _apply(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if any(isinstance(x, _Wide) for x in operands):
        first = operands[0]
        if name in _MOVES and isinstance(first, _Wide) and not any(isinstance(x, _Wide) for x in operands[1:]):
            moved = _bind(equation, [first.value, *operands[1:]])
            return [_Wide(x, first.dtype) for x in moved]
        if name == "convert_element_type" and np.dtype(equation.params["new_dtype"]).itemsize >= 4:
            return _bind(equation, [first.value])
        if name in _RECURSED:
            return _RECURSED[name](equation.params, operands)
    return _bind(equation, [_read(x) for x in operands])


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    functions, params = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _split(operands: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Operands as arrays, and for each the dtype that it stands for, or None."""
    arrays = [x.value if isinstance(x, _Wide) else x for x in operands]
    return arrays, tuple(x.dtype if isinstance(x, _Wide) else None for x in operands)


def _join(arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [x if d is None else _Wide(x, d) for x, d in zip(arrays, dtypes, strict=True)]


@functools.lru_cache(maxsize=1024)
def _jitted(closed: Any, dtypes: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """One jitted function for each traced body, so that a call outside of any jit compiles it once."""
    returned: list[Any] = []

    @jax.jit
    def body(*arrays: Any) -> list[Any]:
        results, returned[:] = _split(_evaluate(closed.jaxpr, closed.consts, _join(arrays, dtypes)))
        return results

    return body, returned


def _jit(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    arrays, dtypes = _split(operands)
    body, returned = _jitted(params["jaxpr"], dtypes)
    results = body(*arrays)
    return _join(results, returned)


def _checkpoint(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    arrays, dtypes = _split(operands)

    def body(*arrays: Any) -> list[Any]:
        return [_read(x) for x in _evaluate(params["jaxpr"], (), _join(arrays, dtypes))]

    return jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])(*arrays)


def _scan(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    closed, consts, carries = params["jaxpr"], params["num_consts"], params["num_carry"]
    start = [_read(x) for x in operands[consts : consts + carries]]  # a carry is new each turn: it keeps its dtype
    constants, constant_dtypes = _split(operands[:consts])
    scanned, scanned_dtypes = _split(operands[consts + carries :])

    def body(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [*_join(constants, constant_dtypes), *carry, *_join(sliced, scanned_dtypes)]
        results = [_read(x) for x in _evaluate(closed.jaxpr, closed.consts, inputs)]
        return results[:carries], results[carries:]

    end, stacked = lax.scan(
        body, start, scanned, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*end, *stacked]


def _cond(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    arrays, dtypes = _split(operands[1:])

    def branch(closed: Any) -> Callable[..., list[Any]]:
        return lambda *arrays: [_read(x) for x in _evaluate(closed.jaxpr, closed.consts, _join(arrays, dtypes))]

    return lax.switch(_read(operands[0]), [branch(closed) for closed in params["branches"]], *arrays)


_RECURSED: dict[str, Callable[[dict[str, Any], list[Any]], list[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
}
