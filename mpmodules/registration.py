"""Flax's modules made known to `policy`, which imports no Flax, and our states to Flax."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

import jax
import numpy as np
from flax import serialization

from mpmodules.calls.plain_layers import after_event
from policy.core.quantization import Quantized
from policy.grads.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from policy.optim.state import Layout
from policy.programs.frameworks import FRAMEWORKS, Framework
from policy.quantized.array import QuantizedArray
from policy.quantized.packing import pack_params, unpack_params

# The functions of Flax as a library of modules that hold state, each loaded when it is first used.
_FUNCTIONS = {
    "noting_modules": ("mpmodules.tracing.names", "noting_modules"),
    "lowered": ("mpmodules.tracing.nnx_pure_calls", "lowered"),
    "is_reference": ("mpmodules.calls.classes", "is_reference"),
    "is_no_parameter": ("mpmodules.tracing.nnx_pure_calls", "is_no_parameter"),
    "eval_shape": ("flax.nnx", "eval_shape"),
}


class _Flax:
    """Flax as a library of modules that hold state (`policy.programs.frameworks.Framework`)."""

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(f"Flax as a framework has no {name!r}")
        module, function = _FUNCTIONS[name]
        value = vars(self)[name] = getattr(importlib.import_module(module), function)
        return value


def register() -> None:
    """Makes Flax known to `policy`, and the classes in a `MixedPrecisionState` and parameters in 8
    and 4 bits to Flax's serialization.
    """
    FRAMEWORKS.append(cast("Framework", _Flax()))
    jax.monitoring.register_event_duration_secs_listener(after_event)
    make_known = functools.partial(serialization.register_serialization_state, override=True)
    make_known(DynamicLossScale, _loss_scale_to, _loss_scale_from)
    make_known(Layout, _layout_to, _layout_from)
    make_known(Quantized, _quantized_to, _quantized_from)
    make_known(QuantizedArray, pack_params, lambda target, state: unpack_params(state, target))
    for fixed in (NoOpLossScale, StaticLossScale):
        make_known(fixed, lambda _: {}, _the_target)


def _quantized_to(x: Quantized) -> dict[str, Any]:
    return {path[0].name: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(x)}


def _quantized_from(target: Quantized, state: Any) -> Quantized:
    names = list(_quantized_to(target))
    if not isinstance(state, dict) or set(state) != set(names):
        raise ValueError(
            f"The saved array should have {', '.join(names)}, as one in 8 bits has: restore it "
            "into a state of the moment_dtype, or a cache of the dtype, that it was saved in."
        )
    return jax.tree.unflatten(jax.tree.structure(target), [state[name] for name in names])


def _loss_scale_to(loss_scale: DynamicLossScale) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(loss_scale)
    return {path[0].name: leaf for path, leaf in leaves}


def _loss_scale_from(target: DynamicLossScale, state: dict[str, Any]) -> DynamicLossScale:
    names = list(_loss_scale_to(target))
    if set(state) != set(names):
        raise ValueError(
            f"The saved loss scale should have {', '.join(names)}, but got "
            f"{', '.join(sorted(state)) or 'nothing'}: restore it into a loss scale of the same "
            "kind and hysteresis."
        )
    return jax.tree.unflatten(jax.tree.structure(target), [state[name] for name in names])


def _text(layout: Layout) -> str:
    return f"master_weights={layout.master_weights!r}, params {', '.join(layout.dtypes or ())}"


def _layout_to(layout: Layout) -> dict[str, Any]:
    # as numbers: what maps over a state dict expects arrays
    texts = {"master_weights": layout.master_weights, "dtypes": ",".join(layout.dtypes or ())}
    return {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}


def _layout_from(target: Layout, state: dict[str, Any]) -> Layout:
    mode, dtypes = (
        bytes(np.asarray(state[name], np.uint8)).decode() for name in ("master_weights", "dtypes")
    )
    saved = Layout(cast("Any", mode), tuple(dtypes.split(",")) if dtypes else None)
    if (saved.storage, saved.dtypes) != (target.storage, target.dtypes):
        raise ValueError(
            f"The optimizer state was saved with {_text(saved)}, and can't be restored into one "
            f"with {_text(target)}. Restore it into a state of the transform that saved it, "
            "then migrate that with convert(state, params, to=tx)."
        )
    return target


def _the_target(target: Any, state: dict[str, Any]) -> Any:
    if state:
        raise ValueError(
            f"The saved loss scale has {', '.join(sorted(state))}, but it is restored into a "
            f"{type(target).__name__}, which has no such fields: restore it into a loss scale of "
            "the kind that was saved."
        )
    return target
