"""Dropout, which returns compute_dtype under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as flax_nn

from mpmodules.linen._layer import Layer
from policy.core.casting import cast_array
from policy.core.precedence import Effective


class Dropout(Layer, flax_nn.Dropout):
    """`flax.linen.Dropout` that obeys policies: a floating input is cast to compute_dtype.

    The masks are Flax's.

    Example:
      >>> layer = linen.Dropout(0.5, deterministic=True, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 4), dtype(bfloat16))
    """

    _dtype_fields: ClassVar[bool] = True

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
        elif policy is not None:
            kwargs = kwargs | {"inputs": cast_array(kwargs["inputs"], policy.compute_dtype)}
        return method(self, *args, **kwargs)
