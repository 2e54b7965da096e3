"""Calls of linen ports whose own code multiplies: traced as pure functions, and run under autocast."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from mpmodules import _carries as carries
from mpmodules._own_code import ASKED_FOR, LAYERS_ONLY, Decisions, Shown, described, told_apart, tracing
from mpmodules._port_options import PortOptions
from mpmodules.linen._calls import roots_unchecked, unrecorded
from policy.amp.ported import Ported, traced
from policy.precedence import warn_once

Method = Callable[..., Any]
_decisions = Decisions()


class _Decided(Exception):
    """Ends a trace before its results are put into the module's scope."""


def call_port(
    module: Any,
    method: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: PortOptions,
    *,
    plainly: Callable[[], Any],
) -> Any:
    """Calls the outermost method of a port in force, its own code under autocast where it multiplies.

    Args:
      module: the port, bound; its scope and its adopter are in force.
      method: the function that Flax wraps.
      args, kwargs: its arguments.
      options: the port's.
      plainly: calls the method as it is.
    """
    key = _key(module, method, args, kwargs)
    shown = ASKED_FOR if options.own_code else _decisions.get(key)
    if shown is None:
        shown = _shown(module, method, args, kwargs)
        if shown is None:
            outputs = plainly()
            _decisions.put(key, LAYERS_ONLY)  # not before: what fails in either way shows nothing
            return outputs
        _decisions.put(key, shown)
    if not shown.autocasts:
        return plainly()
    if shown.text and not module.is_initializing():  # which holds no parameters yet to tell of
        warn_once(_decisions.told(type(module), shown.text))
    if module.is_initializing():  # dtypes and shapes as in a call; initialisers are none of autocast's business
        with tracing():
            outputs = plainly()
    else:
        outputs = _lifted(method, lambda call: call.run(options.policy))(module, *args, **kwargs)
    return carries.cast_outputs(options.policy, outputs, has_carry=False)


def _key(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    fields = [(f.name, getattr(module, f.name, None)) for f in dataclasses.fields(module) if f.name != "parent"]
    function = inspect.unwrap(method)
    code = getattr(function, "__code__", function)  # all lambdas have one name
    return type(module), code, module.is_initializing(), tuple(fields), told_apart(args, kwargs)


def _shown(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shown | None:
    """Returns what a call shows of the code that no layer makes; nothing of the trace remains.

    None where it can't be traced in float32, as code that asks for another dtype: it is called as it is, and says
    itself what is wrong.
    """
    found: list[Shown] = []
    seen: dict[tuple[str, ...], type] = {}

    def look(call: Ported) -> Any:
        name = type(module).__name__
        classes = {(name, *path): cls.__name__ for path, cls in seen.items()}
        found.append(described(name, call, classes, _held(module, seen)))
        raise _Decided

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.setdefault(context.module.path, type(context.module))
        return next_fun(*args, **kwargs)

    try:
        with unrecorded(), flax_nn.intercept_methods(note):
            _lifted(method, look)(module, *args, **kwargs)
    except Exception:  # `_Decided`, or an error of the model's own
        return found[0] if found else None
    raise AssertionError("a trace that is looked at does not return")


def _lifted(method: Method, then: Callable[[Ported], Any]) -> Method:
    """Returns `method` as a pure function of variables and arguments, traced and handed to `then`."""

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        with roots_unchecked() as checked:
            transform = functools.partial(_transform, then=then, checked=checked)
            return decorator_lift_transform(transform, method)(module, *args, **kwargs)

    return called


def _transform(core: Callable[..., Any], *, then: Callable[[Ported], Any], checked: Callable[[], Any]) -> Any:
    """Lifts a function of scopes: its variables and random keys become arguments of a traced function."""

    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        params, others = _params_and_others(variables)

        def call(params: Any, others: Any, inputs: Any) -> Any:
            (variables, rngs), (args, kwargs) = others, inputs
            with tracing(), checked():
                scopes = scope_fn(_joined(params, variables), rngs)
                outputs = core(scopes, *args, **kwargs)
                return outputs, repack(scopes)

        return then(traced(call, params, (others, rngs), (args, kwargs)))

    packed = lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        counters = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        before = copy.deepcopy(counters)
        try:
            return packed(scopes, *args, **kwargs)
        except BaseException:
            for counts, old in zip(counters, before, strict=True):
                _put_back(counts, old)
            raise

    return lifted


def _put_back(counters: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Sets the counters of a scope's random streams, and those of scopes inside of it, to what they were."""
    for key in list(counters):
        if key not in before:
            del counters[key]
        elif isinstance(counters[key], dict):
            _put_back(counters[key], before[key])
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


def _held(module: Any, seen: Mapping[tuple[str, ...], type]) -> dict[str, float]:
    """Returns the shares of the parameters that foreign modules hold themselves, by class."""
    sizes: collections.Counter[str] = collections.Counter()
    total = 0
    leaves = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
    for path, leaf in leaves:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        owner = next((seen[names[:n]] for n in range(len(names), -1, -1) if names[:n] in seen), None)
        total += leaf.size
        if owner is not None and not hasattr(owner, "_is_layer"):
            sizes[owner.__name__] += leaf.size
    return {name: size / total for name, size in sizes.items()} if total else {}
