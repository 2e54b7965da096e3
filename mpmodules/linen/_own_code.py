"""Calls of linen ports whose own code multiplies: traced as pure functions and autocast."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax

from mpmodules._boundary import cast_outputs
from mpmodules._own_code import (
    ASKED_FOR,
    LAYERS_ONLY,
    Decision,
    Decisions,
    describe,
    key_of_call,
    tracing,
)
from mpmodules._port_options import PortOptions
from mpmodules.linen._calls import unrecorded
from mpmodules.linen._pure_calls import Method, lifted
from mpmodules.linen._registry import is_ours
from policy.autocast.own_code import Ported, traced
from policy.precedence import warn_once

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
    """Calls the outermost method of a port in force, its own code under autocast where it
    multiplies.

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
    if (
        module.is_initializing()
    ):  # dtypes and shapes as in a call; initialisers are none of autocast's business
        with tracing():
            outputs = plainly()
    else:
        outputs = _traced(method, lambda call: call.run(options.policy))(module, *args, **kwargs)
    return cast_outputs(options.policy, outputs, has_carry=False)


def _key(module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    fields = [
        (f.name, getattr(module, f.name, None))
        for f in dataclasses.fields(module)
        if f.name != "parent"
    ]
    function = inspect.unwrap(method)
    code = getattr(function, "__code__", function)  # all lambdas have one name
    return type(module), code, module.is_initializing(), tuple(fields), key_of_call(args, kwargs)


def _shown(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Decision | None:
    """Returns the decision on a call from a trace of it, of which nothing remains.

    Returns None where it can't be traced in float32, as code that asks for another dtype: it is
    called as it is, and raises its own error.
    """
    found: list[Decision] = []
    seen: dict[tuple[str, ...], type] = {}

    def look(call: Ported) -> Any:
        name = type(module).__name__
        classes = {(name, *path): cls.__name__ for path, cls in seen.items()}
        found.append(describe(name, call, classes, _held(module, seen)))
        raise _Decided

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.setdefault(context.module.path, type(context.module))
        return next_fun(*args, **kwargs)

    try:
        with unrecorded(), flax_nn.intercept_methods(note):
            _traced(method, look)(module, *args, **kwargs)
    except Exception:  # `_Decided`, or an error of the model's own
        return found[0] if found else None
    raise AssertionError("a trace that is looked at does not return")


def _traced(method: Method, then: Callable[[Ported], Any]) -> Method:
    """Returns `method` as a pure function of variables and arguments, traced in float32 and handed
    to `then`.
    """
    return lifted(method, lambda call, *trees: then(traced(call, *trees)), tracing)


def _held(module: Any, seen: Mapping[tuple[str, ...], type]) -> dict[str, float]:
    """Returns the shares of the parameters that foreign modules hold themselves, by class."""
    sizes: collections.Counter[str] = collections.Counter()
    total = 0
    leaves = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
    for path, leaf in leaves:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        owner = next(
            (seen[names[:n]] for n in range(len(names), -1, -1) if names[:n] in seen), None
        )
        total += leaf.size
        if owner is not None and not is_ours(owner):
            sizes[owner.__name__] += leaf.size
    return {name: size / total for name, size in sizes.items()} if total else {}
