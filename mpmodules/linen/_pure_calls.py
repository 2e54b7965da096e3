"""Calls of linen methods as calls of pure functions: variables and random keys go in, updates of
them come out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from mpmodules._references import is_reference
from mpmodules.linen._calls import roots_unchecked
from mpmodules.linen._half_states import as_stored, half_dtypes, half_states_as_float32

Method = Callable[..., Any]
Run = Callable[[Callable[..., Any], Any, Any, Any], Any]
"""Returns the result of a pure function of parameters, other state and inputs, and of those."""


def lifted(method: Method, run: Run) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that calls a method of a module, given as a pure function to `run`.

    Args:
      method: a method that Flax wrapped.
      run: is called with a function of parameters, other state and inputs, and with these, and
        returns its result.
    """

    @functools.wraps(method)
    def unpacking(module: Any, given: _Given) -> Any:
        return method(module, *given.args, **given.kwargs)

    def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_reference)
        before = copy.deepcopy(module.scope.rng_counters)
        with roots_unchecked() as checked:
            # Flax runs setup here, and again inside.
            start = functools.partial(put_back, module.scope.rng_counters, before)
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
        scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        params, others = _params_and_others(variables)
        stored = half_dtypes(_joined(params, others))
        packed = args[0] if args and isinstance(args[0], _Given) else None

        def call(params: Any, others: Any, inputs: Any) -> Any:
            (variables, rngs), (args, kwargs) = others, inputs
            with checked(), half_states_as_float32(variables) as read:
                scopes = scope_fn(_joined(params, read), rngs)
                if packed is None:
                    outputs = core(scopes, *args, **kwargs)
                else:
                    outputs = core(scopes, _Given(*_released((args, kwargs))))
                return outputs, as_stored(repack(scopes), stored)

        inputs = (args, kwargs) if packed is None else _held((packed.args, packed.kwargs))
        return run(call, params, (others, rngs), inputs)

    packed = lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        start()
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
