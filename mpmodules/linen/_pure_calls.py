"""Calls of linen methods as calls of pure functions: variables and random keys go in, updates of
them come out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from mpmodules.calls.references import is_reference
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._half_states import (
    as_stored,
    half_dtypes,
    half_states_as_float32,
    made_as_stored,
)

Method = Callable[..., Any]
Run = Callable[..., Any]
"""Returns the results of ``call(params, others, inputs)``, given `call` and its arguments."""


def lifted(method: Method, run: Run) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that calls a method of a module, given as a pure function to `run`.

    Args:
      method: a method that Flax wrapped.
      run: runs the pure function.
    """

    @functools.wraps(method)
    def unpacking(module: Any, given: _Given) -> Any:
        return method(module, *given.args, **given.kwargs)

    def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_reference)
        before = _copied(module.scope.rng_counters)
        with _roots_unchecked() as checked:
            # Flax runs setup here, and again inside.
            start = functools.partial(set_counters, module.scope.rng_counters, before)
            transform = functools.partial(_transform, run=run, checked=checked, start=start)
            if any(isinstance(leaf, _OF_LINEN) for leaf in leaves):
                return decorator_lift_transform(transform, method)(module, *args, **kwargs)
            # Flax would copy lists and objects among the arguments.
            return decorator_lift_transform(transform, unpacking)(module, _Given(args, kwargs))

    return called


_OF_LINEN = (flax_nn.Module, flax_nn.Variable)


@dataclasses.dataclass(frozen=True)
class _Held:
    """An object with state, such as an nnx module, which is not to be copied."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Counts:
    """The counts of the random streams of scopes after a call, in the structure of its results."""

    of_scopes: list[dict[Any, Any]]


def _held(tree: Any) -> Any:
    if not any(map(is_reference, jax.tree.leaves(tree, is_leaf=is_reference))):
        return tree  # its lists and dicts are the caller's
    return jax.tree.map(lambda x: _Held(x) if is_reference(x) else x, tree, is_leaf=is_reference)


def _released(tree: Any) -> Any:
    if not any(isinstance(leaf, _Held) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: x.value if isinstance(x, _Held) else x, tree)


class _Given:
    """The arguments of a call, which Flax takes for one."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs


def _transform(
    core: Callable[..., Any],
    *,
    run: Run,
    checked: Callable[[], Any],
    start: Callable[[], None],
) -> Callable[..., Any]:
    """Lifts a function of scopes: its variables and random keys become arguments of a pure one."""

    def inner(
        scope_fn: Any,
        repack: Any,
        variables: Any,
        rngs: Any,
        *,
        counters: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        params, others = _params_and_others(variables)
        stored = half_dtypes(_joined(params, others))
        packed = args[0] if args and isinstance(args[0], _Given) else None

        def call(params: Any, others: Any, inputs: Any) -> Any:
            (variables, rngs), (args, kwargs) = others, inputs
            with checked(), half_states_as_float32(variables) as read:
                scopes = scope_fn(_joined(params, read), rngs)
                with made_as_stored(jax.tree.leaves(scopes)):
                    if packed is None:
                        outputs = core(scopes, *args, **kwargs)
                    else:
                        outputs = core(scopes, _Given(*_released((args, kwargs))))
                state = as_stored(repack(scopes), stored)
                return outputs, state, _Counts(list(map(_copied, counters)))

        inputs = (args, kwargs) if packed is None else _held((packed.args, packed.kwargs))
        trees = params, (others, rngs), inputs
        outputs, state, counted = run(call, trees)
        for counts, after in zip(counters, counted.of_scopes, strict=True):
            set_counters(counts, after)
        return outputs, state

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        start()
        counters = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        before = list(map(_copied, counters))
        call = functools.partial(inner, counters=counters, args=args, kwargs=kwargs)
        try:
            return lift.pack(call, (True,), (True,), (True,))(scopes)
        except BaseException:
            for counts, old in zip(counters, before, strict=True):
                set_counters(counts, old)
            raise

    return lifted


@contextlib.contextmanager
def _roots_unchecked() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Makes no call in a block a root's, and has no setup validated there.

    Yields a context that undoes both.
    """
    outer, validates = calls.seen, calls.validates
    calls.seen, calls.validates = {} if outer is None else outer, False
    try:
        yield lambda: _checked(outer, validates)
    finally:
        calls.seen, calls.validates = outer, validates


@contextlib.contextmanager
def _checked(seen: dict[str, set[type]] | None, validates: bool) -> Iterator[None]:
    before = calls.seen, calls.validates
    calls.seen, calls.validates = seen, validates
    try:
        yield
    finally:
        calls.seen, calls.validates = before


def _copied(counters: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a scope's counters. Flax knows some of the keys by their identity."""
    return {key: _copied(x) if isinstance(x, dict) else x for key, x in counters.items()}


def set_counters(counters: dict[Any, Any], counts: Mapping[Any, Any]) -> None:
    """Sets the counters of a scope's random streams, and those of scopes inside of it."""
    for key in counters.keys() - counts.keys():
        del counters[key]
    for key, count in counts.items():
        if isinstance(count, dict):
            set_counters(counters.setdefault(key, {}), count)
        else:
            counters[key] = count


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
