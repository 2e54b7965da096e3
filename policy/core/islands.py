"""Full-precision islands: blocks and functions that compute in reduction_dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
from jax.typing import DTypeLike

from policy.core.blocks import Block, is_suspended
from policy.core.callables import require_function
from policy.core.casting import cast_floating
from policy.core.scope import current_scope, enter, in_island, multiplying
from policy.programs.frameworks import is_reference
from policy.programs.marks import BOUNDARY, ISLAND, returned

F = TypeVar("F", bound=Callable[..., Any])


@overload
def full_precision(fn: F) -> F: ...
@overload
def full_precision(fn: None = None) -> _Island: ...
def full_precision(fn: F | None = None) -> F | _Island:
    """Opens an island in which compute_dtype is reduction_dtype (float32 in mixed precision).

    ``with full_precision():`` is a block and ``@full_precision`` decorates a function. Inside,
    modules and their layers compute and return reduction_dtype whatever their own policies are,
    parameters of users' modules are read in it, `policy.compute_dtype` returns it, and autocast
    runs operations in float32. An explicit `dtype` argument of a layer still holds.

    A block casts no arrays: operations on half-precision arrays alone stay in half precision unless
    the code casts to `policy.compute_dtype`. A function is also a boundary: in a module's call
    under a policy, its floating arguments are cast to reduction_dtype and its floating outputs to
    the compute_dtype of the surrounding code.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     with policy.full_precision():
    ...         policy.compute_dtype()
    dtype('float32')

    Args:
      fn: the function. None returns a block, which can also be used as a decorator without casts.

    Raises:
      TypeError: `fn` is not a function, or is async or a generator.
      RuntimeError: a block is entered in an async function.
    """
    if fn is None:
        return _Island()
    require_function(fn, "full_precision")
    if is_suspended(fn):
        raise TypeError(
            f"full_precision takes a function of arrays, but {fn.__name__} is async or a "
            "generator: decorate it with @full_precision(), which casts nothing."
        )

    @functools.wraps(fn)
    def island(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope.policy is None or not scope.boundary_open:
            with _Island():
                return fn(*args, **kwargs)
        with jax.named_scope(BOUNDARY):
            args, kwargs = _cast((args, kwargs), scope.policy.reduction_dtype)
        with _Island():
            outputs = fn(*args, **kwargs)
        if scope.traces_own_code:
            return jax.tree.map(returned, outputs)
        with jax.named_scope(BOUNDARY):
            return _cast(outputs, scope.policy.compute_dtype)

    return island  # type: ignore[return-value]


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return cast_floating(tree, dtype, is_leaf=is_reference)


class _Island(Block):
    """An island as a block."""

    _name = "full_precision"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        scope = current_scope()
        policy = in_island(scope.policy)
        inside = dataclasses.replace(scope, policy=policy, in_full_precision=True)
        with jax.named_scope(ISLAND), enter(inside), multiplying(policy, scope.policy):
            yield
