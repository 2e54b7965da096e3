"""Variables in half precision, such as caches: float32 to a user's code, as stored to layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import Scope

from mpmodules.calls.under_way import linen_calls as calls
from policy.core.casting import cast_array, is_floating
from policy.programs import marks


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


# --------------------------------------------------------------------------------------------------
# Variables that a call makes
# --------------------------------------------------------------------------------------------------


class _Made:
    """The half-precision variables made in a call, float32 while it lasts.

    Attributes:
      roots: the variables of the roots of its scopes, which Flax knows by their identity.
      variables: the scope, collection, name and dtypes of each.
    """

    def __init__(self, scopes: Sequence[Scope]):
        self.roots = [scope.root._variables for scope in scopes]
        self.variables: list[tuple[Scope, str, str, dict[str, Any]]] = []


def _made_in(scope: Scope) -> _Made | None:
    """Returns the variables made in the call that a scope belongs to, or None before it is one."""
    root = scope.root._variables
    return next((made for made in calls.made if any(root is each for each in made.roots)), None)


class _Float32Scope(Scope):
    """A scope in which half-precision variables are float32 to the code that makes them."""

    def variable(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, col: str, name: str, *init: Any, **options: Any
    ) -> Any:
        is_made = col != "params" and not self.has_variable(col, name)
        variable = super().variable(col, name, *init, **options)
        made = self.get_variable(col, name) if is_made else None
        halves = half_dtypes(made)
        call = _made_in(self)
        if halves and call is not None:
            wide = jax.tree.map(lambda x: marks.returned_if_half(x) if _is_half(x) else x, made)
            self.put_variable(col, name, wide)
            call.variables.append((self, col, name, halves))
        return variable

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        return _as(_Float32Scope, super().rewound(rewind_rngs))


def _as(cls: type[Scope], scope: Scope) -> Scope:
    """Returns a scope of another class that shares all state with `scope`."""
    other = object.__new__(cls)
    object.__setattr__(other, "__dict__", vars(scope))
    return other


@contextlib.contextmanager
def made_as_stored(scopes: Sequence[Scope]) -> Iterator[None]:
    """Casts the variables made in a block to their half-precision dtypes at its end."""
    made = _Made(scopes)
    calls.made.append(made)
    try:
        yield
        for scope, collection, name, halves in made.variables:
            value = scope.get_variable(collection, name)
            scope.put_variable(collection, name, as_stored(value, halves))
    finally:
        calls.made.pop()


@contextlib.contextmanager
def states_made_in_float32(module: Any) -> Iterator[None]:
    """Makes the half-precision variables that a user's module makes in a trace float32 to it."""
    scope = module.scope
    if type(scope) is not Scope:
        yield
        return
    # The scopes inside of a lifted function end with it.
    is_lifted = _made_in(scope) is None
    lifted = made_as_stored([scope]) if is_lifted else contextlib.nullcontext()
    object.__setattr__(module, "scope", _as(_Float32Scope, scope))
    try:
        with lifted:
            yield
    finally:
        object.__setattr__(module, "scope", _as(Scope, module.scope))


# --------------------------------------------------------------------------------------------------
# Dtypes
# --------------------------------------------------------------------------------------------------


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
