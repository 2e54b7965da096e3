"""Names of optax transforms, read from the functions that make their states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import CellType
from typing import Any, Protocol

import optax


class HasInit(Protocol):
    """A transform, of optax or of another library."""

    @property
    def init(self) -> Callable[..., Any]: ...


def optimizer_name(tx: HasInit, state: optax.OptState | None = None) -> str:
    """Returns a transform's name: ``chain(scale_by_adam)`` for `optax.adam`'s.

    Optax's transforms are pairs of functions. The name is that of the function which made `init`,
    and of the transforms in its closure. Transforms that a function only calls, as the one handed
    to `inject_hyperparams` may, are not seen.

    Args:
      tx: a transform.
      state: a state of it; parts of a chain whose state is empty are left out of the name.
    """
    return _name(tx.init, state, frozenset())


def _name(init: Callable[..., Any], state: Any, around: frozenset[Hashable]) -> str:
    init = inspect.unwrap(init)
    around = around | {_identity(init)}
    if isinstance(init, functools.partial):
        held = [init.func, *init.args, *init.keywords.values()]
        return _with_parts(_made_by(init.func), held, state, around)
    owner = getattr(init, "__self__", None)
    cells = getattr(getattr(init, "__func__", init), "__closure__", None) or ()
    held = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
    held += [cell.cell_contents for cell in cells if _is_filled(cell)]
    return _with_parts(_made_by(init), held, state, around)


def _with_parts(name: str, values: list[Any], state: Any, around: frozenset[Hashable]) -> str:
    inits = [part for value in values for part in _inits(value, state)]
    found = [part for part in inits if _identity(part[0]) not in around]
    parts = [_name(init, part_state, around) for init, part_state in found]
    return f"{name}({', '.join(parts)})" if parts else name


def _identity(init: Callable[..., Any]) -> Hashable:
    """Returns the identity of a function, or of a method, which is made anew on each access."""
    return (id(init.__self__), id(init.__func__)) if inspect.ismethod(init) else id(init)


def _made_by(function: Callable[..., Any]) -> str:
    """Returns `scale_by_adam` for `scale_by_adam.<locals>.init_fn`, and a method's class."""
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return type(owner).__name__
    *around, name = getattr(function, "__qualname__", type(function).__name__).split(".<locals>.")
    return around[-1] if around else name


def _inits(value: Any, state: Any) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yields the init functions in a closure's value, each with its part of the state or None.

    Found in transforms, in the tuples of chains and in functions that make transforms.
    """
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        yield value.init, None
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _inits(value[key], None)
    elif isinstance(value, (tuple, list)):
        has_parts = isinstance(state, tuple) and len(state) == len(value)
        states = state if has_parts else [None] * len(value)
        for each, its_state in zip(value, states, strict=True):
            if not isinstance(its_state, optax.EmptyState):
                yield from ((init, its_state) for init, _ in _inits(each, None))
    elif inspect.isfunction(value) and (_is_init(value) or _is_factory(value)):
        yield value, None


def _is_init(function: Callable[..., Any]) -> bool:
    is_local = ".<locals>." in function.__qualname__
    name = function.__name__
    return is_local and (name in ("init", "init_fn") or name.endswith("_init_fn"))


def _is_factory(function: Callable[..., Any]) -> bool:
    """Returns whether a function makes transforms, as the one in `inject_hyperparams` does."""
    return "GradientTransformation" in str(
        getattr(function, "__annotations__", {}).get("return", "")
    )


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is bound later
        return False
