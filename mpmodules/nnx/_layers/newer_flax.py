# pyright: reportAttributeAccessIssue=false
"""Layers of newer releases of Flax: rotary position embedding, with positions, angles and tables in
reduction_dtype and the rotated result in its input's dtype; and averages of parameters, in float32
or not at all.

Each is exported where Flax has it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.functions.functional import mixing_allowed
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._layers.dot_product_attention import dot_product_attention
from policy.core.arrays import cast_array, path_name, unboxed
from policy.core.messages import shortened
from policy.core.scope import reduction_dtype_of

_FLAX_ROPE: Any = getattr(flax_nnx, "RoPE", flax_nnx.Module)


class RoPE(Layer, _FLAX_ROPE):
    """`flax.nnx.RoPE` that obeys policies.

    Positions, which half precision can't count (bfloat16 has 257 and 256 in one), and their sines
    and cosines are in reduction_dtype; so is the rotation, which is rounded once to the input's
    dtype, or under a policy to compute_dtype.

    Example:
      >>> layer = nnx.RoPE(dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.ones((2, 5, 8))).dtype
      dtype(bfloat16)
    """

    _takes_inputs_as_they_come: ClassVar[bool] = True

    def _call_layer(self, call: MethodCall) -> Any:
        arguments = dict(zip(("x", "input_positions"), call.args, strict=False)) | call.kwargs
        x = arguments["x"]
        policy, dtype = call.policy, call.returned_dtype
        if call.method.__name__ != "__call__" or not jnp.issubdtype(
            jnp.result_type(x), jnp.floating
        ):
            return call.run(self)
        wide = reduction_dtype_of(x) if policy is None else policy.reduction_dtype
        sin, cos = self._angles(x, arguments.get("input_positions"), wide)
        sin, cos = (jnp.concatenate([table, table], -1) for table in (sin, cos))
        sin, cos = (t.reshape((1,) * (x.ndim - t.ndim) + t.shape) for t in (sin, cos))
        widened = jnp.asarray(x, wide)
        rotated = widened * cos + self._rotate_half(widened) * sin
        return cast_array(rotated, jnp.result_type(x) if dtype is None else dtype)

    def _angles(
        self, x: jax.Array, positions: jax.Array | None, wide: DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sines and cosines of each position, (length, width / 2) or with axes of the
        batch before.
        """
        length, width = x.shape[-2:]
        if positions is None and self.cached_sin is not None:
            found = (self.cached_sin[...][:length], self.cached_cos[...][:length])
        else:
            positions = jnp.arange(length) if positions is None else jnp.asarray(positions)
            if positions.shape[-1] != length:
                raise ValueError(
                    f"`input_positions` must have the same seq_len as `x`, but got "
                    f"{positions.shape[-1]} and {length}."
                )
            with mixing_allowed():  # with x64 enabled, Flax's angles are float64
                found = self._rotation_for(width, positions.astype(wide))
        return found[0].astype(wide), found[1].astype(wide)


def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: flax_nnx.Module,
    input_positions: jax.Array | None = None,
    **kwargs: Any,
) -> jax.Array:
    """`flax.nnx.dot_product_attention_with_rope`: queries and keys rotated by `rope`, then
    `dot_product_attention`.

    Args:
      query: (batch..., queries, heads, width).
      key, value: (batch..., keys, key heads, width).
      rope: a `RoPE`, ours or Flax's.
      input_positions: (length,), or (batch..., length) with a position for each token of the batch,
        which Flax's own function does not take.
      **kwargs: as in `dot_product_attention`.

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> nnx.dot_product_attention_with_rope(x, x, x, rope=nnx.RoPE()).shape
      (2, 5, 4, 8)
    """
    query, key = _rotated(query, rope, input_positions), _rotated(key, rope, input_positions)
    return dot_product_attention(query, key, value, **kwargs)


def _rotated(x: jax.Array, rope: Any, positions: jax.Array | None) -> jax.Array:
    """Rotates each head of `x` (batch..., length, heads, width); returns x's dtype."""
    if positions is not None and positions.ndim > 1:
        return jax.vmap(lambda x, positions: _rotated(x, rope, positions))(x, positions)
    rotated = jax.vmap(lambda x: rope(x, positions), in_axes=-2, out_axes=-2)(x)
    return rotated.astype(x.dtype)


class EMA(flax_nnx.EMA):
    """`flax.nnx.EMA` that rejects half-precision variables: such an average stops following them.

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
