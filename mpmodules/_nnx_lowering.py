"""Calls of nnx modules lowered to calls of pure functions, whose parameters and other state are
arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules._nnx_names import named_modules
from policy._jaxpr.trace import Lowered
from policy.casting import cast_array, is_floating

_NODES = (flax_nnx.Module, flax_nnx.Rngs, flax_nnx.RngStream, flax_nnx.Variable, flax_nnx.Optimizer)


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """Lowers a call of a module or method, or with modules among its arguments, to a call of a pure
    function.

    Every `nnx.Param` of the modules is a parameter, and the call's updates of their state are put
    in place. A `nnx.State` is a tree of arrays, as for `jax.jit`: changes of modules that are
    merged from it do not change it.
    """
    module, method = _holder(fn)
    is_node = lambda leaf: isinstance(leaf, _NODES)  # noqa: E731
    is_leaf = lambda leaf: isinstance(leaf, (*_NODES, flax_nnx.State))  # noqa: E731
    leaves, treedef = jax.tree.flatten((module, args, kwargs), is_leaf=is_leaf)
    places = tuple(map(is_node, leaves))
    if not any(places):
        return None
    nodes = tuple(leaf for leaf, is_one in zip(leaves, places, strict=True) if is_one)
    others = [
        leaf for leaf, is_one in zip(leaves, places, strict=True) if not is_one
    ]  # shapes will do for arrays
    graph, params, rest = flax_nnx.split(nodes, flax_nnx.Param, ...)

    def finish(returned: tuple[Any, Any]) -> Any:
        out, state = returned
        flax_nnx.update(nodes, _as_stored(state, flax_nnx.state(nodes, flax_nnx.Variable)))
        return out

    pure = functools.partial(_pure, method, graph, treedef, places)
    key = (hashable(graph), treedef, places)
    return Lowered(
        key,
        pure,
        (params, rest, others),
        finish=finish,
        result=lambda returned: returned[0],
        states=(1,),
        origins=functools.partial(_origins, treedef, places, params, rest, others),
    )


def _as_stored(after: Any, before: Any) -> Any:
    """Returns state after a call, in half precision where it was before."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        return after

    def stored(new: Any, old: Any) -> Any:
        is_half = is_floating(old) and old.dtype.itemsize == 2
        return cast_array(new, old.dtype) if is_half and is_floating(new) else new

    return jax.tree.map(stored, after, before)


def _origins(treedef: Any, places: tuple[bool, ...], *split: Any) -> tuple[int | None, ...]:
    """Returns the position of the argument that each leaf of a lowered call came from.

    Args:
      treedef: of the module, positional and keyword arguments.
      places: for each of its leaves, whether it is a node.
      *split: the parameters, other state, and other leaves.
    """
    keys = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(treedef, range(treedef.num_leaves))
    )
    # (module, args, kwargs): the second key of one of args is its position.
    of_leaf = [path[1].idx if path[0].idx == 1 else None for path, _ in keys]
    of_nodes = [i for i, is_node in zip(of_leaf, places, strict=True) if is_node]
    of_others = [i for i, is_node in zip(of_leaf, places, strict=True) if not is_node]
    *states, others = split
    of_states = [
        of_nodes[path[0].key]
        for state in states
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    return (
        *of_states,
        *(
            position
            for position, other in zip(of_others, others, strict=True)
            for _ in jax.tree.leaves(other)
        ),
    )


def hashable(graph: Any) -> Any:
    """Returns a key for a graphdef: itself, or where lists, dicts or sets are static in it, the
    contents of those.

    A graphdef that has no key is returned as it is: one of arrays or modules that are static, which
    may change.
    """
    try:
        hash(graph)
        return graph
    except TypeError:
        pass
    try:
        key = (
            tuple(graph.nodes),
            tuple((name, _frozen(attribute)) for name, attribute in graph.attributes),
        )
        hash(key)
        return key
    except TypeError:
        return graph


def _frozen(value: Any) -> Any:
    """Returns static data as a hashable value.

    Raises:
      TypeError: it holds modules or variables, which compare by identity.
    """
    if isinstance(value, _NODES):
        raise TypeError(f"{type(value).__name__} is not static data.")
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, (dict, set, frozenset)):
        pairs = value.items() if isinstance(value, dict) else ((item, None) for item in value)
        return type(value), frozenset((_frozen(key), _frozen(item)) for key, item in pairs)
    if isinstance(value, flax_nnx.graph.Static):
        return type(value), _frozen(value.value)
    # 1, 1.0 and True are equal, and -0.0 is 0.0.
    return type(value), value.hex() if isinstance(value, float) else value


def _holder(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the module that a function is, or is a method of, or None.

    And the function of module and arguments.
    """
    if isinstance(fn, flax_nnx.Module):
        return fn, lambda module, *args, **kwargs: module(*args, **kwargs)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, flax_nnx.Module):
        return owner, lambda module, *args, **kwargs: getattr(module, fn.__name__)(*args, **kwargs)
    return None, lambda _, *args, **kwargs: fn(*args, **kwargs)


def _pure(
    method: Callable[..., Any],
    graph: Any,
    treedef: Any,
    places: tuple[bool, ...],
    params: Any,
    rest: Any,
    others: Any,
) -> Any:
    nodes = flax_nnx.merge(graph, params, rest, copy=True)
    merged, given = iter(nodes), iter(others)
    leaves = [next(merged) if is_node else next(given) for is_node in places]
    module, args, kwargs = jax.tree.unflatten(treedef, leaves)
    with named_modules(nodes):
        out = method(module, *args, **kwargs)
    return out, flax_nnx.state(nodes, flax_nnx.Variable)


def is_no_parameter(node: Any) -> bool:
    """Returns whether an object is a variable of nnx that no gradient is taken by."""
    return isinstance(node, flax_nnx.Variable) and not isinstance(node, flax_nnx.Param)
