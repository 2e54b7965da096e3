"""Embed: looks up in the stored table, casts afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.linen._layer import Layer, declared_field, half_safe_fields
from mpmodules.linen._resolution import fields_set
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective


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
    _accumulates_in: ClassVar[Any] = None

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        fields = super()._policy_fields(policy, output_dtype, method_name)
        return fields | half_safe_fields(self, fields["param_dtype"])  # the table is made in setup

    def attend(self, query: jax.Array) -> jax.Array:
        """Returns the inner products of a query (..., features) with each embedding: (...,
        num_embeddings).
        """
        if self._accumulates_in is None:
            undecorated: Any = inspect.unwrap(
                flax_nn.Embed.attend
            )  # the method machinery is entered once
            return undecorated(self, query)
        promoted: Any = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        query, table = promoted
        return functional.accumulating(jnp.dot, self._accumulates_in)(query, table.T)

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        if declared_field(self, "promote_dtype") is not promote_dtype:
            return super()._call_layer(effective, crosses, method, args, kwargs)
        if method.__name__ == "__call__":
            return self._look_up(effective, crosses, method, args, kwargs)
        if (
            crosses
            and policy is not None
            and functional.is_wider(policy.output_dtype, policy.compute_dtype)
        ):
            with fields_set(self, {"_accumulates_in": policy.output_dtype}):
                return super()._call_layer(effective, crosses, method, args, kwargs)
        return super()._call_layer(effective, crosses, method, args, kwargs)

    def _look_up(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        fields = self._policy_fields(policy, None, method.__name__)
        reduction_dtype = jnp.float32 if policy is None else policy.reduction_dtype
        stored: list[Any] = []

        def as_stored(
            table: jax.Array, *, dtype: DTypeLike | None = None, inexact: bool = True
        ) -> list[jax.Array]:
            stored.append(table.dtype)
            return [functional.widen(table, reduction_dtype)]

        with fields_set(self, fields | {"promote_dtype": as_stored}):
            embedded = method(self, *args, **kwargs)
        if effective.dtype is not None:
            return embedded.astype(effective.dtype)
        if policy is not None:
            return cast_array(embedded, returned_dtype(policy, crosses))
        output_dtype = fields["dtype"] if fields["dtype"] is not None else stored[-1]
        return embedded if embedded.dtype == output_dtype else embedded.astype(output_dtype)
