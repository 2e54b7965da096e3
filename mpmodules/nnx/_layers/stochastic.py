"""Dropout, which returns compute_dtype under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.nnx._layer import Layer
from policy.core.casting import cast_array
from policy.core.precedence import Effective


class Dropout(Layer, flax_nnx.Dropout):
    """`flax.nnx.Dropout` that obeys policies: a floating input is cast to compute_dtype.

    Masks are Flax's own.

    Example:
      >>> layer = nnx.Dropout(0.5, deterministic=True, dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.ones((2, 4))).dtype
      dtype(bfloat16)
    """

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        if policy is not None and args:
            args = (cast_array(args[0], policy.compute_dtype), *args[1:])
        elif policy is not None and "inputs" in kwargs:
            kwargs = kwargs | {"inputs": cast_array(kwargs["inputs"], policy.compute_dtype)}
        return method(self, *args, **kwargs)
