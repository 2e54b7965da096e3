"""EMA: averages of parameters, in float32 or not at all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from policy.core.arrays import path_name, unboxed
from policy.core.messages import shortened


class EMA(flax_nnx.EMA):
    """`flax.nnx.EMA` that refuses half-precision variables: such an average stops following them.

    A step of it, `(1 - decay) (param - ema)`, is lost in rounding where it is below half an ulp:
    with a decay of 0.999 a bfloat16 average of a weight that falls from 1 to 0 stays at 1. The
    master weights are float32::

        ema = nnx.EMA(master_params(nnx.state(model, nnx.Param), optimizer), decay=0.999)
        ema.update(master_params(nnx.state(model, nnx.Param), optimizer))  # after each step

    Args:
      params: a model, or a state of its variables, in float32 or wider; integers pass.
      decay: how much of itself the average keeps at each update.
      only: a filter: the variables to track.
      **options: handed to `flax.nnx.EMA`.

    Raises:
      ValueError: a tracked variable, or one that `update` is given, is floating and narrower than
        float32.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> ema = nnx.EMA(model, decay=0.999, only=nnx.Param)
      >>> ema.update(model)
    """

    def __init__(self, params: Any, decay: float, *, only: Any = ..., **options: Any):
        _check_wide(params, only, **options)
        super().__init__(params, decay, only=only, **options)

    def update(self, updates: Any) -> None:
        """Moves the average towards `updates`, of the structure of the `params` that it was made
        from.
        """
        _check_wide(updates, self.filter, graph=self.graph)
        super().update(updates)


def _check_wide(params: Any, only: Any, **options: Any) -> None:
    narrow = [
        f"{path_name(path)} is {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            unboxed(flax_nnx.state(params, only, **options))
        )
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    ]
    if narrow:
        raise ValueError(
            f"An EMA should be of float32 params, but {shortened(narrow)}: in half precision "
            "the average stops following them. Average the masters, master_params(nnx.state(model, "
            "nnx.Param), optimizer), or cast_floating(params, 'float32')."
        )
