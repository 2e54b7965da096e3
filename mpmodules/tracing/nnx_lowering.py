"""Calls of nnx modules lowered to calls of pure functions, whose parameters and other state are
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.tracing.nnx_names import named
from mpmodules.tracing.nnx_pure_calls import StatefulCall
from policy.programs.tracing.trace import Lowered

_NODES = (flax_nnx.Module, flax_nnx.Rngs, flax_nnx.RngStream, flax_nnx.Variable, flax_nnx.Optimizer)


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """Lowers a call of a module or method, or with modules among its arguments, to a call of a pure
    function.

    Every `nnx.Param` of the modules is a parameter, and the call's updates of their state are put
    in place. A `nnx.State` is a tree of arrays, as for `jax.jit`: changes of modules that are
    merged from it do not change it.
    """
    module, method = _holder(fn)
    owner = () if module is None else (module,)
    call = StatefulCall(method, (*owner, *args), kwargs)
    if not call.nodes:
        return None

    def origins() -> tuple[int | None, ...]:
        found = call.origins()
        return tuple(None if i is None or i < len(owner) else i - len(owner) for i in found)

    return Lowered(
        (hashable(call.graph), call.structure),
        call.inside(prepared=named, has_states=True),
        call.trees,
        finish=call.finish,
        result=lambda returned: returned[0],
        states=(1,),
        origins=origins,
    )


def hashable(graph: Any) -> Any:
    """Returns a key for a graphdef: itself, or where lists, dicts or sets are static in it, the
    contents of those.

    A graphdef that has no key is returned as it is: one of arrays or modules that are static, which
    may change.
    """
    try:
        hash(graph)
        return graph
    except TypeError:
        pass
    try:
        key = (
            tuple(graph.nodes),
            tuple((name, _frozen(attribute)) for name, attribute in graph.attributes),
        )
        hash(key)
        return key
    except TypeError:
        return graph


def _frozen(value: Any) -> Any:
    """Returns static data as a hashable value.

    Raises:
      TypeError: it holds modules or variables, which compare by identity.
    """
    if isinstance(value, _NODES):
        raise TypeError(f"{type(value).__name__} is not static data.")
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, (dict, set, frozenset)):
        pairs = value.items() if isinstance(value, dict) else ((item, None) for item in value)
        return type(value), frozenset((_frozen(key), _frozen(item)) for key, item in pairs)
    if isinstance(value, flax_nnx.graph.Static):
        return type(value), _frozen(value.value)
    # 1, 1.0 and True are equal, and -0.0 is 0.0.
    return type(value), value.hex() if isinstance(value, float) else value


def _holder(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the module that a function is, or is a method of, or None.

    And the function of module and arguments, or the function itself.
    """
    if isinstance(fn, flax_nnx.Module):
        return fn, _call
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, flax_nnx.Module):
        return owner, lambda module, *args, **kwargs: getattr(module, fn.__name__)(*args, **kwargs)
    return None, fn


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def is_no_parameter(node: Any) -> bool:
    """Returns whether an object is a variable of nnx that no gradient is taken by."""
    return isinstance(node, flax_nnx.Variable) and not isinstance(node, flax_nnx.Param)
