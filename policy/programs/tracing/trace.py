"""Any call as a program of arrays, which autocast rewrites and the inspection tools read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from policy.programs.frameworks import FRAMEWORKS, make_jaxpr
from policy.programs.tracing.pure_calls import Arguments, is_array


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A call of a function that holds arrays or changes state, as a call of a pure function.

    Attributes:
      key: distinguishes the pure functions of one function; hashable.
      pure: the pure function, whose first argument is the parameters.
      args, kwargs: the arguments of the pure function.
      finish: stores the returned state, and returns the result of the call.
      result: extracts the result of the call from that of the pure function.
      states: the positions among `args` of state other than parameters.
      origins: returns, for each leaf of ``(args, kwargs)``, the position of the argument that it
        came from; None for leaves of the function itself and of keyword arguments.
    """

    key: Any
    pure: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Any], Any] = lambda out: out
    result: Callable[[Any], Any] = lambda out: out
    states: tuple[int, ...] = ()
    origins: Callable[[], tuple[int | None, ...]] = tuple


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """Returns the call of a pure function of its arguments; None if the call is one already."""
    for framework in FRAMEWORKS:
        call = framework.lowered(fn, args, kwargs)
        if call is not None:
            return call
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    for holder, pure in (  # the tree of arrays that `fn` is, or is a method of
        (fn, lambda holder, *args, **kwargs: holder(*args, **kwargs)),
        (owner, lambda holder, *args, **kwargs: getattr(holder, name)(*args, **kwargs)),
    ):
        leaves = [] if holder is None or isinstance(holder, type) else jax.tree.leaves(holder)
        if any(leaf is not holder and is_array(leaf) for leaf in leaves):
            origins = functools.partial(origins_of, args, kwargs, len(leaves))
            return Lowered(type(holder), pure, (holder, *args), kwargs, origins=origins)
    return None


def origins_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], held: int = 0
) -> tuple[int | None, ...]:
    """Returns, for each leaf of a call's arguments, the position of its argument; see `Lowered`.

    Those of as many leaves of the function itself as `held` come first.
    """
    positions = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return (*[None] * held, *positions, *[None] * len(jax.tree.leaves(kwargs)))


def function_name(fn: Any) -> str:
    """Returns the name of a function, or of the class of a module."""
    while hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def is_staged(array: Any) -> bool:
    """Returns whether operations on an array become equations of a program, as inside of jit."""
    while isinstance(array, jax.core.Tracer):
        inner = getattr(array, "primal", getattr(array, "val", array))
        if inner is array or not hasattr(inner, "dtype"):
            return True
        array = inner
    return False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf of a module that is no array, such as a function: static while a result is traced."""

    value: Any


def with_static(tree: Any) -> Any:
    """Returns a result as one of arrays alone, whose modules hold `Static` beside them."""

    def held(path: Any, leaf: Any) -> Any:
        in_module = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
        return leaf if hasattr(leaf, "dtype") or not in_module else Static(leaf)

    return jax.tree.map_with_path(held, tree)


def without_static(tree: Any) -> Any:
    """Returns a result as the function returned it, the inverse of `with_static`."""
    is_static = lambda node: isinstance(node, Static)  # noqa: E731
    return jax.tree.map(lambda n: n.value if is_static(n) else n, tree, is_leaf=is_static)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call as a program of its arrays.

    Attributes:
      jaxpr: the closed jaxpr.
      shape: the result of the call, as a tree of `jax.ShapeDtypeStruct`.
      arguments: the arguments of the call.
      called: the function that was called; None if the call was lowered to a function with other
        arguments.
    """

    jaxpr: Any
    shape: Any
    arguments: Arguments
    called: Callable[..., Any] | None = None


def trace(fn: Any, *args: Any, **kwargs: Any) -> Traced:
    """Traces a call of any function, bound method or module.

    Nothing runs; shapes are accepted in place of arrays.
    """
    name = function_name(fn)
    call = lowered(fn, args, kwargs)
    if call is not None:
        fn, args, kwargs = call.pure, call.args, call.kwargs
    arguments = Arguments.of(args, kwargs)

    def flat(*arrays: Any) -> Any:
        args, kwargs = arguments.filled(arrays)
        return with_static(fn(*args, **kwargs))

    flat.__name__ = name
    jaxpr, shape = make_jaxpr(flat, return_shape=True)(*arguments.arrays)
    return Traced(jaxpr, shape, arguments, None if call is not None else fn)
