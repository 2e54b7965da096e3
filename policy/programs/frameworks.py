"""Libraries whose modules hold state: `policy` imports none, and is told of them here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from policy.programs.thread import during


class Framework(Protocol):
    """A library of modules that hold state."""

    def noting_modules(self) -> AbstractContextManager[Any]:
        """Notes the names of the modules that are called in a block."""
        ...

    def lowered(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a call as one of a pure function, which passes state in and out.

        It is a `policy.programs.tracing.trace.Lowered`; None for calls that do not concern the
        library.
        """
        ...

    def is_reference(self, x: Any) -> bool:
        """Returns whether `x` is state, or is tied to state, that a copy would lose."""
        ...

    def is_no_parameter(self, node: Any) -> bool:
        """Returns whether a tree node holds an array that is no parameter, as nnx's BatchStat."""
        ...

    def eval_shape(self, function: Callable[[], Any], /) -> Any:
        """Returns the shapes of what a function builds."""
        ...


FRAMEWORKS: list[Framework] = []

Port = Callable[[Any, tuple[Any, ...], Any, Any], tuple[Any, tuple[Any, ...]] | None]
PORTS: list[Port] = []
"""Return a function and its arguments with a policy and rules applied to copies of the modules that
captured a policy when they were built; None where there are no such modules.
"""


def is_reference(x: Any) -> bool:
    """Returns whether casts pass `x` on by identity, since a copy would lose state."""
    return any(framework.is_reference(x) for framework in FRAMEWORKS)


def with_policy(
    fn: Any, args: tuple[Any, ...], policy: Any, rules: Any
) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns a call with a policy and rules applied to its modules, as one of `PORTS` does."""
    return next(filter(None, (port(fn, args, policy, rules) for port in PORTS)), None)


def make_jaxpr(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Acts as `jax.make_jaxpr`, and notes the names of the modules that `function` calls.

    The source lines of their operations are kept.
    """

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(during(keeps_lines=True))
            for framework in FRAMEWORKS:
                stack.enter_context(framework.noting_modules())
            return function(*args)

    return jax.make_jaxpr(noting, **options)
