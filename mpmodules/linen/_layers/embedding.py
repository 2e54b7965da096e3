"""Embed: looks up in the stored table, casts afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from mpmodules.layers.matmul_calls import (
    Numerics,
    Product,
    embedded,
    inner_products,
    look_up,
    require_tokens,
)
from mpmodules.linen._layer import Layer, half_safe_fields
from policy.core.policy import Policy


class Embed(Layer, flax_nn.Embed):
    """`flax.linen.Embed` that obeys policies.

    The lookup reads the stored table and the result is cast afterwards, so that the gradient of a
    token is summed over its occurrences in reduction_dtype (a table stored in half is widened
    first, which XLA fuses into the lookup). `attend` is a matmul in compute_dtype; where it is a
    boundary with a wider output_dtype it returns its accumulator.

    Example:
      >>> layer = linen.Embed(10, 4, dtype_policy="p=f32,c=bf16")
      >>> tokens = jnp.zeros(4096, jnp.int32)
      >>> y, variables = layer.init_with_output(key, tokens)
      >>> y.shape, y.dtype
      ((4096, 4), dtype(bfloat16))
      >>> loss = lambda variables: layer.apply(variables, tokens).sum()
      >>> jax.grad(loss)(variables)["params"]["embedding"][0]  # each occurrence counts
      Array([4096., 4096., 4096., 4096.], dtype=float32)
    """

    param_dtype: DTypeLike | None = None

    _takes_inputs_as_they_come: ClassVar[bool] = True

    def _policy_fields(self, policy: Policy | None) -> dict[str, Any]:
        fields = super()._policy_fields(policy)
        return fields | half_safe_fields(self, fields["param_dtype"])  # the table is made in setup

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Looks up integers of any shape: (..., features)."""
        require_tokens(inputs)
        if self.promote_dtype is not promote_dtype:
            promoted: Any = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
            return look_up(promoted[0], inputs)
        return embedded(self.embedding, inputs, numerics=self._numerics, dtype=self.dtype)

    def attend(self, query: jax.Array) -> jax.Array:
        """Returns the inner products of a query (..., features) with each embedding: (...,
        num_embeddings).
        """
        promoted: Any = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        numerics = self._numerics if self.promote_dtype is promote_dtype else Numerics()
        return Product(self, (*promoted, None), None, inner_products, numerics=numerics).multiply()
