"""Names of optax transforms, read from the functions that make their states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def optimizer_name(tx: Any) -> str:
    """Returns a transform's name: ``chain(scale_by_adam, scale_by_learning_rate)`` for `optax.adam`'s.

    Optax's transforms are pairs of functions. The name is that of the function which made `init`, and of the transforms
    in its closure. Transforms without a state of their own share a name.
    """
    return _name(tx.init, set())


def _name(init: Callable[..., Any], seen: set[int]) -> str:
    seen = {*seen, id(init)}
    if isinstance(init, functools.partial):
        return _with_parts(_made_by(init.func), [*init.args, *init.keywords.values()], seen)
    owner = getattr(init, "__self__", None)
    cells = getattr(getattr(init, "__func__", init), "__closure__", None) or ()
    held = [*vars(owner).values()] if hasattr(owner, "__dict__") else []
    return _with_parts(_made_by(init), [*held, *(cell.cell_contents for cell in cells if _is_filled(cell))], seen)


def _with_parts(name: str, values: list[Any], seen: set[int]) -> str:
    parts = [_name(init, seen) for value in values for init in _inits(value) if id(init) not in seen]
    return f"{name}({', '.join(parts)})" if parts else name


def _made_by(function: Any) -> str:
    """`scale_by_adam` of `scale_by_adam.<locals>.init_fn`, and the class of a method."""
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return type(owner).__name__
    return getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]


def _inits(value: Any) -> Iterator[Callable[..., Any]]:
    """Yields the init functions in a value of a closure: of transforms, of chains' tuples, of factories."""
    if callable(getattr(value, "init", None)):
        yield value.init
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _inits(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _inits(each)
    elif inspect.isfunction(value) and (_is_init(value) or _is_factory(value)):
        yield value


def _is_init(function: Any) -> bool:
    made_by, _, name = function.__qualname__.rpartition(".<locals>.")
    return bool(made_by) and "init" in name


def _is_factory(function: Any) -> bool:
    """Returns whether a function makes transforms, as the one that `inject_hyperparams` holds does."""
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    return "GradientTransformation" in returned


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is bound later
        return False
