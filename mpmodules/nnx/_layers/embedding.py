"""Embed: looks up in the stored table, casts afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype

from mpmodules.layers.matmul_calls import (
    Numerics,
    Product,
    embedded,
    inner_products,
    look_up,
    require_tokens,
)
from mpmodules.nnx._layer import Layer


class Embed(Layer, flax_nnx.Embed):
    """`flax.nnx.Embed` that obeys policies.

    The lookup reads the stored table and the result is cast afterwards, so that the gradient of a
    token is summed over its occurrences in reduction_dtype (a table stored in half is widened
    first, which XLA fuses into the lookup). `attend` is a matmul in compute_dtype; where it is a
    boundary with a wider output_dtype it returns its accumulator.

    Example:
      >>> layer = nnx.Embed(10, 4, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> tokens = jnp.zeros(4096, jnp.int32)
      >>> layer(tokens).dtype
      dtype(bfloat16)
      >>> gradients = nnx.grad(lambda layer: layer(tokens).sum())(layer)
      >>> gradients["embedding"][...][0]  # each occurrence counts
      Array([4096., 4096., 4096., 4096.], dtype=float32)
    """

    _takes_inputs_as_they_come: ClassVar[bool] = True

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Looks up integers of any shape: (..., features)."""
        require_tokens(inputs)
        table = self.embedding[...]
        if self.promote_dtype is not promote_dtype:
            (table,) = self.promote_dtype((table,), dtype=self.dtype, inexact=False)
            return look_up(table, inputs, out_sharding)
        numerics, dtype = self._numerics, self.dtype
        return embedded(table, inputs, numerics=numerics, dtype=dtype, out_sharding=out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the inner products of a query (..., features) with each embedding: (...,
        num_embeddings).
        """
        promoted = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        numerics = self._numerics if self.promote_dtype is promote_dtype else Numerics()
        product = Product(self, (*promoted, None), None, inner_products, numerics=numerics)
        return product.multiply(out_sharding=out_sharding)
