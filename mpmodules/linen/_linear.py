"""Dense, DenseGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as flax_nn
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from mpmodules import functional
from mpmodules.linen._layer import Layer, declared_field
from mpmodules.linen._module import dtype_fields
from policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class PromoteToAccumulator:
    """A `promote_dtype` that casts the operands to compute_dtype and a bias to the accumulator's dtype."""

    compute_dtype: np.dtype
    accumulator_dtype: np.dtype

    def __call__(self, *arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
        inputs, kernel, *bias = arrays
        return [
            *promote_dtype(inputs, kernel, dtype=self.compute_dtype),
            *(None if b is None else jnp.asarray(b, self.accumulator_dtype) for b in bias),
        ]


def accumulator_fields(layer: Any, policy: Policy | None, output_dtype: Any, hook: str, operation: Any) -> dict:
    """The fields that make a matmul layer return its accumulator, where it is to return more than compute_dtype.

    An operation or a `promote_dtype` of the user's own is left in place: then the result is widened afterwards.

    Args:
      hook: the name of the field that takes the operation.
      operation: makes the operation from the accumulator's dtype.
    """
    if policy is None or output_dtype is None or not functional.is_wider(output_dtype, policy.compute_dtype):
        return {}
    given = (declared_field(layer, hook), declared_field(layer, f"{hook}_cls"))
    if any(value is not None for value in given) or declared_field(layer, "promote_dtype") is not promote_dtype:
        return {}
    promote = PromoteToAccumulator(policy.compute_dtype, jnp.dtype(output_dtype))
    return {hook: operation(output_dtype), "promote_dtype": promote}


class Dense(Layer, flax_nn.Dense):
    """`flax.linen.Dense` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype, and so is the result.
    A Dense that is a boundary with a wider output_dtype returns the matmul's accumulator.
    """

    param_dtype: Any = None

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self, policy, output_dtype, "dot_general", functional.accumulating_dot_general
        )


class DenseGeneral(Layer, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` that obeys policies; dtypes as in `Dense`."""

    param_dtype: Any = None

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self, policy, output_dtype, "dot_general", functional.accumulating_dot_general
        )


class Einsum(Layer, flax_nn.Einsum):
    """`flax.linen.Einsum` that obeys policies; dtypes as in `Dense`.

    Flax gives this layer no hook for its matmul: one that is a boundary with a wider output_dtype widens its result.
    """

    param_dtype: Any = None
