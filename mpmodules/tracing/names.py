"""Names of models, odd names of modules, and dtype arguments of layers, noted for `policy` where a
call is traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as flax_nn
import jax
from flax import nnx as flax_nnx

from mpmodules.calls.classes import InstanceMethod, remedy_for
from mpmodules.calls.under_way import linen_calls, nnx_calls
from mpmodules.tracing.nnx_rebuilding import Rebuilding, one_per_class, stand_in
from policy.core.policy import Policy
from policy.core.precedence import note_given, note_obeyed, note_remedy
from policy.programs.paths import joined, note, note_repeated, note_root

# --------------------------------------------------------------------------------------------------
# Linen
# --------------------------------------------------------------------------------------------------


def model_name(module: flax_nn.Module) -> str:
    """Returns the name of a model on JAX's name stack."""
    return joined([module.name or ""]) or type(module).__name__


@functools.cache
def _is_layer_of_flax(cls: type) -> bool:
    """Returns whether a class is, or derives from, a layer of Flax's that takes dtypes."""
    return any(
        base.__module__.startswith("flax.linen.")
        and {"dtype", "param_dtype"} <= vars(base).get("__annotations__", {}).keys()
        for base in cls.__mro__
    )


def _note_module(next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
    module, outer = context.module, linen_calls.traced
    if module.name is not None:
        note(module.name)
        if module.scope is not None:
            note_repeated((outer, *module.path))
    if module.scope is not None:
        model = model_name(module) if not module.path else linen_calls.traced_model
        note_remedy(model, joined(module.path), remedy_for(type(module), "linen"))
        if _is_layer_of_flax(type(module)):
            note_given(model, joined(module.path), getattr(module, "dtype", None))
    if outer or module.scope is None:
        return next_fun(*args, **kwargs)
    traced = model_name(module)
    if not module.path:
        note_root(traced)
    with linen_calls.noting(traced=traced, traced_model="" if module.path else traced):
        return next_fun(*args, **kwargs)


def noting_modules() -> AbstractContextManager[None]:
    """Notes the names of the linen modules that are called in a block."""
    return flax_nn.intercept_methods(_note_module)


# --------------------------------------------------------------------------------------------------
# Nnx: Flax puts no paths on the name stack. A trace calls copies of modules, which carry theirs.
# Copies of our modules enter a name scope at their boundary; those of others are of a subclass
# whose `__call__` does.
# --------------------------------------------------------------------------------------------------


# The attribute that holds the path of a copy. Flax takes names that begin so for no items of a
# Dict, and for no variables.
PATH = "_pytree__policy_path"


def named(node: Any) -> Any:
    """Returns a copy of a tree of nnx objects, with the same variables, whose modules put their
    paths on JAX's name stack, below the root's class, when they are called.

    Copies that nnx's transformations make of it do so too.
    """
    copy = Rebuilding(_class_of_named, keeps_variables=True)(node)
    for root in _roots(copy):
        for path, module in _below(root):
            if callable(module):
                vars(module)[PATH] = joined(path)
    return copy


def _class_of_named(node: Any) -> type:
    enters_scope = hasattr(type(node), "_policy_source")  # ours does, at its boundary
    is_named = isinstance(node, flax_nnx.Module) and callable(node) and not enters_scope
    return _named_class(type(node)) if is_named else type(node)


@one_per_class
def _named_class(cls: Any) -> Any:
    method = inspect.getattr_static(cls, "__call__")

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with name_scope(self):
            return method.__get__(self, cls)(*args, **kwargs)

    return stand_in(cls, {"__call__": InstanceMethod(cls.__call__, call)})


@contextlib.contextmanager
def name_scope(module: Any) -> Iterator[None]:
    """Enters the scope of the path that a module carries, unless it is the innermost one."""
    outer, path = nnx_calls.path, tuple(vars(module).get(PATH, "").split("/"))
    if path in (("",), outer):
        yield
        return
    relative = path[len(outer) :] if path[: len(outer)] == outer else path
    with nnx_calls.noting(path=path), jax.named_scope("/".join(relative)):
        yield


def note_island(module: Any, policy: Policy | None) -> None:
    """Notes for reports that a module obeys the policy of an island in a call."""
    name, _, below = vars(module).get(PATH, "").partition("/")
    if name:
        note_obeyed(name, below, policy)


def _roots(node: Any) -> list[Any]:
    is_module = lambda leaf: isinstance(leaf, flax_nnx.Module)  # noqa: E731
    leaves = jax.tree.leaves(node, is_leaf=is_module)
    return list({id(leaf): leaf for leaf in leaves if is_module(leaf)}.values())


def _below(root: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns a root's modules, and the path of each below the root's class name."""
    name = type(root).__name__
    below = [((name, *map(str, path)), module) for path, module in flax_nnx.iter_modules(root)]
    for key in {key for path, _ in below for key in path}:
        note(key)
    note_root(name)
    for path, module in below:
        note_remedy(name, joined(path[1:]), remedy_for(type(module), "nnx"))
        note_obeyed(name, joined(path[1:]), getattr(module, "dtype_policy", None))
        if type(module).__module__.startswith(("flax.nnx.", "mpmodules.nnx.")):
            note_given(name, joined(path[1:]), getattr(module, "dtype", None))
        note_repeated(path)
    return below
