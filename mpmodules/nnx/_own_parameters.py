"""Parameters that a user's nnx module holds itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx as flax_nnx

from mpmodules.calls.own_parameters import is_written_by_user, warn_of_unknown_names
from mpmodules.calls.references import is_reference
from policy.core.casting import cast_floating
from policy.core.policy import Policy


def own_params(module: Any, kind: type = flax_nnx.Param) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that a module holds itself, in lists, tuples and dicts too, by
    attribute.

    Args:
      module: the module.
      kind: of variables to yield.
    """
    for name, attribute in vars(module).items():
        if not name.startswith(("_pytree__", "_object__")):
            yield from ((name, param) for param in _params_in(attribute, kind))


def _params_in(value: Any, kind: type) -> Iterator[Any]:
    """Yields the variables that an attribute of a module is, or holds in containers, but none of
    other modules.
    """
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple | dict):
        for leaf in jax.tree.leaves(value, is_leaf=is_reference):
            if isinstance(leaf, kind) or _is_container(leaf):
                yield from _params_in(leaf, kind)
    elif _is_container(value):
        for held in vars(value).values():
            yield from _params_in(held, kind)


def _is_container(value: Any) -> bool:
    is_pytree = isinstance(value, flax_nnx.Pytree) and not isinstance(value, flax_nnx.Module)
    return is_pytree or isinstance(value, flax_nnx.List | flax_nnx.Dict)


def store_in_param_dtype(module: Any, policy: Policy | None, arguments: Any) -> None:
    """Casts the parameters that a user's module has just made to param_dtype.

    Args:
      module: the module, just built.
      policy: its policy.
      arguments: those that it was built with; parameters among them are shared, and stay as they
        are.
    """
    if not is_written_by_user(type(module), flax_nnx.Module):
        return
    if type(module).keep_params:
        warn_of_unknown_names(type(module), (name for name, _ in own_params(module)), "the module")
    if policy is None:
        return
    shared = {id(leaf) for leaf in _variables(arguments)}
    for name, param in own_params(module):
        if name not in type(module).keep_params and id(param) not in shared:
            param.set_raw_value(cast_floating(param.get_raw_value(), policy.param_dtype))


def _variables(tree: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(tree, is_leaf=is_reference):
        if isinstance(leaf, flax_nnx.Variable):
            yield leaf
        elif isinstance(leaf, flax_nnx.Module):
            yield from (
                node for _, node in flax_nnx.iter_graph(leaf) if isinstance(node, flax_nnx.Variable)
            )
