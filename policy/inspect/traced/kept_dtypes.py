"""The dtypes in which a function takes parameters and returns them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from policy.programs.jaxprs import maker_of
from policy.programs.reading.source_lines import source_of
from policy.programs.tracing.trace import lowered, trace


def parameters_of(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: int, returned: int, keeps: bool
) -> tuple[dict[str, str], dict[str, tuple[int, str]], Any]:
    """Returns incoming dtypes by name, outgoing places and dtypes by name, and the program.

    Unless `keeps`, the outgoing parameters stand for the incoming ones.
    """
    call, traced = lowered(fn, args, kwargs), trace(fn, *args, **kwargs)
    dtypes = [_dtype(leaf) for leaf in jax.tree.leaves(traced.shape)]
    places = jax.tree.unflatten(jax.tree.structure(traced.shape), range(len(dtypes)))
    # modules, whose state is handed in and out
    has_state = call is not None and call.finish is not type(call).finish
    if has_state or isinstance(places, tuple):
        places = places[1 if has_state else returned]
    after = {name: (place, dtypes[place]) for name, place in _named(places)}
    if not (has_state or keeps):
        return {name: dtype for name, (_, dtype) in after.items()}, after, traced.jaxpr
    given = args[params] if call is None or not has_state else call.args[0]
    return {name: _dtype(leaf) for name, leaf in _named(given)}, after, traced.jaxpr


def _dtype(leaf: Any) -> str:
    return str(jnp.result_type(leaf))


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree with their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path) or "the parameter", leaf


def origin_of(jaxpr: Any, place: int) -> str:
    """Returns the operation that makes a program's output, and its source line."""
    equation = maker_of(jaxpr, place)
    if equation is None:
        return "an argument"
    return f"{equation.primitive.name}, {source_of(equation) or 'source line unknown'}"
