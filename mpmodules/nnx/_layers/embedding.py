"""Embed: looks up in the stored table, casts afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._resolution import in_complex, viewed
from policy.core.casting import cast_array
from policy.core.precedence import Effective


@dataclasses.dataclass(frozen=True)
class AsStored:
    """A `promote_dtype` that leaves the table as it is stored, widened to reduction_dtype where it
    is narrower.
    """

    reduction_dtype: np.dtype

    def __call__(
        self, arrays: tuple[Any, ...], /, *, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> tuple[Any, ...]:
        return tuple(functional.widen(x, self.reduction_dtype) for x in arrays)


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

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy, name = effective.policy, method.__name__
        if self.promote_dtype is not promote_dtype:
            return method(self, *args, **kwargs)
        if name == "__call__":
            reduction_dtype = jnp.dtype(jnp.float32) if policy is None else policy.reduction_dtype
            embedded = method(
                viewed(self, promote_dtype=AsStored(reduction_dtype)), *args, **kwargs
            )
            return cast_array(
                embedded, self.dtype if policy is None else returned_dtype(policy, crosses)
            )
        view = in_complex(self, args, kwargs)
        if view is not None:
            return method(view, *args, **kwargs)
        if (
            name == "attend"
            and policy is not None
            and crosses
            and functional.is_wider(policy.output_dtype, policy.compute_dtype)
        ):
            return self._attend_accumulating(policy.output_dtype, *args, **kwargs)
        return method(self, *args, **kwargs)

    def _attend_accumulating(
        self, dtype: DTypeLike, query: jax.Array, out_sharding: Any = None
    ) -> jax.Array:
        query, table = promote_dtype((query, self.embedding[...]), dtype=self.dtype)

        def dot(query: jax.Array, table: jax.Array, **preferred: Any) -> jax.Array:
            return jnp.dot(query, table.T, out_sharding=out_sharding, **preferred)

        return functional.accumulating(dot, dtype)(query, table)
