"""Calls of linen methods as calls of pure functions: variables and random keys go in, updates of
them come out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from mpmodules.linen._calls import roots_unchecked

Method = Callable[..., Any]
Run = Callable[[Callable[..., Any], Any, Any, Any], Any]
"""Returns the result of a pure function of parameters, other state and inputs, and of those."""


def lifted(
    method: Method,
    run: Run,
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Method:
    """Returns a method that hands itself to `run` as a pure function of variables and arguments.

    Args:
      method: a method that Flax wrapped.
      run: is called with the function and its arguments, and returns its result.
      inside: a context to be in force while the function runs.
    """

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        with roots_unchecked() as checked:
            transform = functools.partial(_transform, run=run, inside=inside, checked=checked)
            return decorator_lift_transform(transform, method)(module, *args, **kwargs)

    return called


def _transform(
    core: Callable[..., Any], *, run: Run, inside: Callable[[], Any], checked: Callable[[], Any]
) -> Callable[..., Any]:
    """Lifts a function of scopes: its variables and random keys become arguments of a pure one."""

    def inner(
        scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        params, others = _params_and_others(variables)

        def call(params: Any, others: Any, inputs: Any) -> Any:
            (variables, rngs), (args, kwargs) = others, inputs
            with inside(), checked():
                scopes = scope_fn(_joined(params, variables), rngs)
                outputs = core(scopes, *args, **kwargs)
                return outputs, repack(scopes)

        return run(call, params, (others, rngs), (args, kwargs))

    packed = lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        counters = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        before = copy.deepcopy(counters)
        try:
            return packed(scopes, *args, **kwargs)
        except BaseException:
            for counts, old in zip(counters, before, strict=True):
                put_back(counts, old)
            raise

    return lifted


def put_back(counters: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Sets the counters of a scope's random streams, and those of scopes inside of it, to their
    earlier values.
    """
    for key in list(counters):
        if key not in before:
            del counters[key]
        elif isinstance(counters[key], dict):
            put_back(counters[key], before[key])
        else:
            counters[key] = before[key]


def _params_and_others(groups: Any) -> tuple[Any, Any]:
    """Divides the variables of each scope in each group into `params` and the rest."""
    params = [[_only(scope, lambda name: name == "params") for scope in group] for group in groups]
    others = [[_only(scope, lambda name: name != "params") for scope in group] for group in groups]
    return params, others


def _only(collections_: Mapping[str, Any], keeps: Callable[[str], bool]) -> dict[str, Any]:
    return {name: tree for name, tree in collections_.items() if keeps(name)}


def _joined(params: Any, others: Any) -> Any:
    return tuple(
        tuple({**of_params, **of_others} for of_params, of_others in zip(*pair, strict=True))
        for pair in zip(params, others, strict=True)
    )
