"""Normalisations of both wings, and of Flax, behind one face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as flax_linen
import flax.nnx as flax_nnx
import jax
import numpy as np

from mpmodules import linen, nnx

NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "GroupNorm": {"num_groups": 2},
    "InstanceNorm": {},
    "BatchNorm": {"use_running_average": False},
}
WINGS: dict[str, tuple[Any, Any]] = {"linen": (linen, flax_linen), "nnx": (nnx, flax_nnx)}
EPSILON = dict.fromkeys(NORMS, 1e-6) | {"BatchNorm": 1e-5}


def built(
    modules: Any, name: str, x: Any, *, features: Any = None, jit: bool = True, **options: Any
) -> tuple[Any, Callable[..., Any]]:
    """Returns the variables, and a call: variables and inputs to the result and new variables."""
    options = NORMS[name] | options
    wrap: Any = jax.jit if jit else lambda function: function
    if modules in (linen, flax_linen):
        layer = getattr(modules, name)(**options)

        def apply(variables: Any, *args: Any, **kwargs: Any) -> Any:
            return layer.apply(variables, *args, mutable=["batch_stats"], **kwargs)

        return layer.init(jax.random.key(0), x), wrap(apply)
    features = x.shape[-1] if features is None else features
    layer = getattr(modules, name)(features, rngs=flax_nnx.Rngs(0), **options)
    graph, state = flax_nnx.split(layer)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        copy = flax_nnx.merge(graph, state, copy=True)
        return copy(*args, **kwargs), flax_nnx.state(copy)

    return state, wrap(call)


def normalised(modules: Any, name: str, x: Any, **options: Any) -> Any:
    variables, call = built(modules, name, x, **options)
    return call(variables, x)[0]


def leaves_named(tree: Any, *names: str) -> list[Any]:
    """Returns the leaves whose paths hold one of the names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [x for path, x in leaves if any(f"'{n}'" in jax.tree_util.keystr(path) for n in names)]


def exact(name: str, x: Any) -> np.ndarray:
    """The result of a fresh layer, in float64."""
    x = np.asarray(x, np.float64)
    shape, last = x.shape, x.ndim - 1
    if name == "RMSNorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON[name])
    if name == "GroupNorm":
        x = x.reshape(*shape[:-1], 2, shape[-1] // 2)
    axes = {
        "LayerNorm": (last,),
        "GroupNorm": (*range(1, last), last + 1),
        "InstanceNorm": tuple(range(1, last)),
        "BatchNorm": tuple(range(last)),
    }[name]
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return ((x - mean) / np.sqrt(variance + EPSILON[name])).reshape(shape)
