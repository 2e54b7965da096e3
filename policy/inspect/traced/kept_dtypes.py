"""The dtypes in which a function takes parameters and returns them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from policy.programs.equations import maker_of
from policy.programs.source_lines import source_of
from policy.programs.trace import lowered, trace


def parameters_of(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: int, returned: int, keeps: bool
) -> tuple[dict[str, str], dict[str, tuple[int, str]], Any]:
    """Returns incoming dtypes by name, outgoing places and dtypes by name, and the program.

    Unless `keeps`, the outgoing parameters stand for the incoming ones.
    """
    call = lowered(fn, args, kwargs)
    traced = trace(fn, *args, **kwargs)
    places = jax.tree.unflatten(
        jax.tree.structure(traced.shape), range(len(jax.tree.leaves(traced.shape)))
    )
    shape = traced.shape
    # modules, whose state is handed in and out
    if call is not None and call.finish is not type(call).finish:
        given, (shape, places) = call.args[0], (shape[1], places[1])
        before = _dtypes(given)
        after = _placed(shape, places)
        return before, {name: after[name] for name in before if name in after}, traced.jaxpr
    if isinstance(shape, tuple):
        shape, places = shape[returned], places[returned]
    after = _placed(shape, places)
    return (
        (_dtypes(args[params]) if keeps else {n: d for n, (_, d) in after.items()}),
        after,
        traced.jaxpr,
    )


def _dtypes(tree: Any) -> dict[str, str]:
    """Returns the dtype of each leaf, by its path in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path) or "the parameter": str(jnp.result_type(leaf))
        for path, leaf in leaves
    }


def _placed(shape: Any, places: Any) -> dict[str, tuple[int, str]]:
    return dict(
        zip(
            _dtypes(shape),
            zip(jax.tree.leaves(places), _dtypes(shape).values(), strict=True),
            strict=True,
        )
    )


def origin_of(jaxpr: Any, place: int) -> str:
    """Returns the operation that makes a program's output, and its source line."""
    equation = maker_of(jaxpr, place)
    if equation is None:
        return "an argument"
    return f"{equation.primitive.name}, {source_of(equation) or 'source line unknown'}"
