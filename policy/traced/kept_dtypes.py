"""The dtypes in which a function takes parameters and gives them back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from policy._jaxpr.source_lines import source_of
from policy._jaxpr.subprograms import opened
from policy._jaxpr.trace import lowered, trace


def parameters_of(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: int, returned: int, keeps: bool
) -> tuple[dict[str, str], dict[str, tuple[int, str]], Any]:
    """The dtypes of parameters that go in, by name; the places and dtypes of what comes out; and the program.

    Where nothing is to be kept, what comes out is also what went in.
    """
    call = lowered(fn, args, kwargs)
    traced = trace(fn, *args, **kwargs)
    places = jax.tree.unflatten(jax.tree.structure(traced.shape), range(len(jax.tree.leaves(traced.shape))))
    shape = traced.shape
    if call is not None and call.finish is not type(call).finish:  # modules, whose state is handed in and out
        given, (shape, places) = call.args[0], (shape[1], places[1])
        before = _dtypes(given)
        after = _placed(shape, places)
        return before, {name: after[name] for name in before if name in after}, traced.jaxpr
    if isinstance(shape, tuple):
        shape, places = shape[returned], places[returned]
    after = _placed(shape, places)
    return (_dtypes(args[params]) if keeps else {n: d for n, (_, d) in after.items()}), after, traced.jaxpr


def _dtypes(tree: Any) -> dict[str, str]:
    """The dtype of each leaf, by its place in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "the parameter": str(jnp.result_type(leaf)) for path, leaf in leaves}


def _placed(shape: Any, places: Any) -> dict[str, tuple[int, str]]:
    return dict(zip(_dtypes(shape), zip(jax.tree.leaves(places), _dtypes(shape).values(), strict=True), strict=True))


def origin_of(jaxpr: Any, place: int | None) -> str:
    """The operation that makes a program's output, and its source line."""
    body, _ = opened(jaxpr)
    assert place is not None
    for equation in reversed(body.eqns):
        if body.outvars[place] in equation.outvars:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            index = equation.outvars.index(body.outvars[place])
            if inner is not None and len(opened(inner)[0].outvars) == len(equation.outvars):
                return origin_of(inner, index)
            return f"{equation.primitive.name}, {source_of(equation) or 'source line unknown'}"
    return "an argument"
