"""Any call as a program of arrays: what autocast rewrites, and what the inspection tools read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from policy._jaxpr.module_names import make_jaxpr, note_keys


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A call whose function holds arrays, or changes state in place, as a call of a pure one.

    Attributes:
      key: tells pure functions of one function apart; hashable.
      pure: the pure function, whose first argument are parameters.
      args, kwargs: what it is called with.
      finish: puts the state that it returned in place, and gives what the call returns.
      result: what the call returns, out of what the pure function returned.
    """

    key: Any
    pure: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Any], Any] = lambda out: out
    result: Callable[[Any], Any] = lambda out: out


# How libraries whose modules hold state hand it in and out: each gives None where a call is none of
# its business.
LOWERINGS: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Lowered | None]] = []


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """The call as one of a function of its arguments alone; None where it is that already."""
    for lower in LOWERINGS:
        call = lower(fn, args, kwargs)
        if call is not None:
            return call
    holder, pure = _held(fn)
    return None if holder is None else Lowered(type(holder), pure, (holder, *args), kwargs)


def _held(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """The tree of arrays that a function is, or is a method of, which are arguments too; None where
    there is none.
    """
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    for holder, pure in (
        (fn, lambda holder, *args, **kwargs: holder(*args, **kwargs)),
        (owner, lambda holder, *args, **kwargs: getattr(holder, name)(*args, **kwargs)),
    ):
        leaves = [] if holder is None or isinstance(holder, type) else jax.tree.leaves(holder)
        if any(leaf is not holder and is_array(leaf) for leaf in leaves):
            return holder, pure
    return None, fn


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, apart: the arrays, and the rest, which a program holds fixed.

    Attributes:
      arrays: the leaves that are arrays, or the shapes of some.
      treedef: of ``(args, kwargs)``.
      is_array: which of its leaves are arrays.
      static: the other leaves.
    """

    arrays: list[Any]
    treedef: Any
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        note_keys(treedef)
        dynamic = tuple(map(is_array, leaves))
        arrays = [leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic]
        static = tuple(
            leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if not is_dynamic
        )
        return cls(arrays, treedef, dynamic, static)

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other arrays in them."""
        dynamic, fixed = iter(arrays), iter(self.static)
        return jax.tree.unflatten(
            self.treedef, [next(dynamic) if i else next(fixed) for i in self.is_array]
        )

    @property
    def key(self) -> Any:
        """A key for programs of one function, beside the shapes of the arrays; may have no hash."""
        exact = tuple(
            leaf.hex() if isinstance(leaf, float) else leaf for leaf in self.static
        )  # -0.0 is not 0.0
        return self.treedef, self.is_array, exact, tuple(map(type, self.static))

    def names(self) -> list[str]:
        """The path of each array in the call: ``args[0]['params']['kernel']``, ``kwargs['mask']``."""
        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(self.treedef, list(self.is_array))
        )[0]
        kinds = ("args", "kwargs")
        return [
            kinds[getattr(p[0], "idx", 0)] + jax.tree_util.keystr(p[1:])
            for p, dynamic in paths
            if dynamic
        ]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call, as a program of its arrays.

    Attributes:
      jaxpr: the closed jaxpr.
      shape: what the call returns, as `jax.ShapeDtypeStruct`.
      arguments: what it was called with.
      called: the function that was called; None where the call was lowered, to one with arguments
        of its own.
    """

    jaxpr: Any
    shape: Any
    arguments: Arguments
    called: Callable[..., Any] | None = None


def trace(fn: Any, *args: Any, **kwargs: Any) -> Traced:
    """Traces a call of any function, bound method or module. Nothing runs; shapes will do for
    arrays.
    """
    return traced_around(fn, args, kwargs, lambda pure, _: pure)


def traced_around(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[Callable[..., Any], bool], Callable[..., Any]],
) -> Traced:
    """Traces what `around` makes of a call's function of arrays, and of whether it was lowered; see
    `trace`.
    """
    call = lowered(fn, args, kwargs)
    if call is not None:
        fn, args, kwargs = call.pure, call.args, call.kwargs
    arguments = Arguments.of(args, kwargs)
    called = around(fn, call is not None)

    def flat(*arrays: Any) -> Any:
        args, kwargs = arguments.filled(arrays)
        return called(*args, **kwargs)

    jaxpr, shape = make_jaxpr(flat, return_shape=True)(*arguments.arrays)
    return Traced(jaxpr, shape, arguments, None if call is not None else fn)
