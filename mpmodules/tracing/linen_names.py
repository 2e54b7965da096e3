"""Names of models, odd names of modules, and dtype arguments of layers, noted for `policy` where a
call is traced.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as flax_nn

from mpmodules.calls.layer_classes import remedy_for
from mpmodules.calls.under_way import linen_calls as calls
from policy.core.requested_dtypes import note_given, note_remedy
from policy.programs.paths import joined, note, note_repeated, note_root


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
    module, outer = context.module, calls.traced
    if module.name is not None:
        note(module.name)
        if module.scope is not None:
            note_repeated((outer, *module.path))
    if module.scope is not None:
        model = model_name(module) if not module.path else calls.traced_model
        note_remedy(model, joined(module.path), remedy_for(type(module), "linen"))
        if _is_layer_of_flax(type(module)):
            note_given(model, joined(module.path), getattr(module, "dtype", None))
    if outer or module.scope is None:
        return next_fun(*args, **kwargs)
    calls.traced = model_name(module)
    calls.traced_model = "" if module.path else calls.traced
    if not module.path:
        note_root(calls.traced)
    try:
        return next_fun(*args, **kwargs)
    finally:
        calls.traced = outer


def noting_modules() -> AbstractContextManager[None]:
    """Notes the names of the linen modules that are called in a block."""
    return flax_nn.intercept_methods(_note_module)
