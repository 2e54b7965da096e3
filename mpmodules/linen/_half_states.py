"""Variables in half precision, such as caches: float32 to a user's code, as stored to layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from mpmodules.linen._calls import calls
from policy._jaxpr import marks
from policy.casting import cast_array, is_floating


@contextlib.contextmanager
def half_states_as_float32(variables: Any) -> Iterator[Any]:
    """Yields variables as a user's code reads them in a trace: half-precision ones in float32."""
    outer, calls.half_states = calls.half_states, {}

    def read(stored: Any) -> Any:
        if not _is_half(stored):
            return stored
        value = marks.returned_if_half(stored)
        calls.half_states[id(value)] = value, stored
        return value

    try:
        yield jax.tree.map(read, variables)
    finally:
        calls.half_states = outer


def put_back_for_layer(module: Any) -> None:
    """Gives a layer its own half-precision variables as they are stored."""
    if not calls.half_states:
        return

    def stored(value: Any) -> Any:
        _, found = calls.half_states.get(id(value), (None, value))
        return found

    for collection, tree in dict(module.scope.variables()).items():
        if collection == "params" or not module.scope.is_mutable_collection(collection):
            continue
        for name, value in dict(tree).items():
            module.scope.put_variable(collection, name, jax.tree.map(stored, value))


def half_dtypes(variables: Any) -> dict[str, Any]:
    """Returns the dtypes of half-precision variables, by their paths."""
    return {
        jax.tree_util.keystr(path): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
        if _is_half(leaf)
    }


def as_stored(after: Any, halves: Mapping[str, Any]) -> Any:
    """Returns variables after a call, in half precision where they were before."""
    if not halves:
        return after

    def cast(path: Any, value: Any) -> Any:
        dtype = halves.get(jax.tree_util.keystr(path))
        return value if dtype is None or not is_floating(value) else cast_array(value, dtype)

    return jax.tree_util.tree_map_with_path(cast, after)


def _is_half(leaf: Any) -> bool:
    return is_floating(leaf) and leaf.dtype.itemsize == 2
