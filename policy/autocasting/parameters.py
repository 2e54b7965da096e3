"""Finds the parameters among a function's arguments, and warns about optimizer states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from policy.core.arrays import nnx_files
from policy.core.messages import warn_once
from policy.optim.state import MixedPrecisionState

ParamsArgument = int | str | Sequence[int | str] | Callable[[Any], bool] | None


def require_params(params: Any) -> None:
    named = [params] if isinstance(params, (int, str)) else params
    is_collection = isinstance(named, Collection) and not isinstance(named, (bytes, Mapping))
    if params is None or callable(params):
        return
    if not is_collection or any(
        isinstance(name, bool) or not isinstance(name, (int, str)) for name in named
    ):
        raise TypeError(
            "params should be positions or names of arguments, or a predicate on leaves, but got a "
            f"{type(params).__name__}. If the function has an argument of that name, pass it by "
            "position, or call the function in a lambda."
        )


def parameters(
    fn: Any, params: ParamsArgument, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[bool]:
    """Returns, for each leaf of ``(args, kwargs)``, whether it is a parameter."""
    if callable(params):
        return [bool(params(leaf)) for leaf in jax.tree.leaves((args, kwargs))]
    if params is None:
        has_collection = any(map(_holds_params, (*args, *kwargs.values())))

        def is_params(i: int | None, arg: Any) -> bool:
            return i == 0 and not has_collection and not jax.tree_util.all_leaves([arg])

        return _marked(args, kwargs, lambda key: key == "params", is_params)
    named = [params] if isinstance(params, (int, str)) else list(params)
    positions = {_position(fn, name, args) for name in named if name not in kwargs}
    return [
        *(i in positions for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)),
        *(name in named for name, arg in sorted(kwargs.items()) for _ in jax.tree.leaves(arg)),
    ]


def other_state(
    args: tuple[Any, ...], kwargs: dict[str, Any], positions: Collection[int] = ()
) -> list[bool]:
    """Returns, for each leaf of ``(args, kwargs)``, whether it is state of a module beside its
    parameters: in another collection of a mapping with `params`, or in an argument at `positions`.
    """
    return _marked(args, kwargs, lambda key: key != "params", lambda i, _: i in positions)


def _position(fn: Any, name: int | str, args: tuple[Any, ...]) -> int:
    position: Any = name
    if isinstance(name, str):
        names = list(inspect.signature(fn).parameters)
        if name not in names:
            raise ValueError(
                f"params names the argument {name!r}, but the function takes {', '.join(names)}."
            )
        position = names.index(name)
    if not -len(args) <= position < len(args):
        raise ValueError(
            f"params names argument {name!r}, but the function was called with {len(args)} "
            "positional arguments."
        )
    return position % len(args)


def _holds_params(arg: Any) -> bool:
    return isinstance(arg, Mapping) and "params" in arg


def _marked(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of_collection: Callable[[Any], bool],
    of_argument: Callable[[int | None, Any], bool],
) -> list[bool]:
    """Returns a mark for each leaf of ``(args, kwargs)``: by its collection in a mapping with
    `params`, otherwise by its argument and the position of that, None for keywords.
    """
    found: list[bool] = []
    for i, arg in (*enumerate(args), *((None, arg) for _, arg in sorted(kwargs.items()))):
        holds_params = _holds_params(arg)
        found += [
            of_collection(getattr(path[0], "key", None)) if holds_params else of_argument(i, arg)
            for path, _ in jax.tree_util.tree_leaves_with_path(arg)
        ]
    return found


def warn_of_optimizer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warns about optimizer states among the arguments: updates would run in half precision."""
    found: list[str] = []

    def is_state(node: Any) -> bool:
        cls = type(node)
        of_optax = cls.__module__.split(".")[0] == "optax" and cls.__name__.endswith("State")
        if is_one := of_optax or isinstance(node, MixedPrecisionState):
            found.append(cls.__name__)
        return is_one

    jax.tree.leaves((args, kwargs), is_leaf=is_state)
    _warn_of(found)


def warn_of_nnx_optimizer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warns about an `nnx.Optimizer` argument, whose state is only variables when traced."""
    given = (*args, *kwargs.values())
    found = [arg for arg in given if hasattr(arg, "opt_state") and nnx_files(arg)]
    _warn_of([type(arg).__name__ for arg in found])


def _warn_of(found: list[str]) -> None:
    if found:
        warn_once(
            "autocast is applied to a function that takes an optimizer state "
            f"({', '.join(dict.fromkeys(found))}), so the update inside runs in half precision. "
            "Apply autocast to the loss function only, and keep the update outside."
        )
