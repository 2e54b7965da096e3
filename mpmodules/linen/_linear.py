"""Dense, DenseGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype

from mpmodules import functional
from mpmodules.linen._layer import Layer, declared_field
from mpmodules.linen._module import dtype_fields, fields_set
from policy.policy import Policy
from policy.precedence import Effective


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


class Biased(Layer):
    """What the matmul and convolution layers share: the gradient of a half bias is summed in reduction_dtype."""

    @flax_nn.nowrap
    def _bias_shape(self, y: jax.Array, operands: list[jax.Array], args: tuple[Any, ...], kwargs: dict) -> Any:
        """The shape in which the bias is added to `y`, or None to leave its gradient to Flax.

        Args:
          operands: inputs, kernel and bias as they entered the matmul.
          args, kwargs: the arguments of the call.
        """
        return functional.trailing(y, operands[2])

    def _call_layer(
        self, effective: Effective, crosses: bool, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        stored: list[tuple[jax.Array, list[jax.Array]]] = []

        def promote(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
            promoted = promote_dtype(*arrays, dtype=dtype, inexact=inexact)
            if len(promoted) < 3 or promoted[2] is None or not functional.is_half(promoted[2].dtype):
                return promoted
            stored.append((arrays[2], promoted))
            return [*promoted[:2], jax.lax.stop_gradient(promoted[2])]

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer.promote_dtype is not promote_dtype:
                return method(layer, *args, **kwargs)
            with fields_set(layer, {"promote_dtype": promote}):
                return method(layer, *args, **kwargs)

        y = super()._call_layer(effective, crosses, run, args, kwargs)
        for bias, operands in stored:
            shape = self._bias_shape(y, operands, args, kwargs)
            wide = jnp.float32 if effective.policy is None else effective.policy.reduction_dtype
            y = functional.with_bias_gradient(y, bias, shape, wide)
        return y


class Dense(Biased, flax_nn.Dense):
    """`flax.linen.Dense` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype, and so is the result.
    A Dense that is a boundary with a wider output_dtype returns the matmul's accumulator.
    """

    param_dtype: Any = None

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self, policy, output_dtype, "dot_general", functional.accumulating_dot_general
        )


class DenseGeneral(Biased, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` that obeys policies; dtypes as in `Dense`."""

    param_dtype: Any = None

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self, policy, output_dtype, "dot_general", functional.accumulating_dot_general
        )

    @flax_nn.nowrap
    def _bias_shape(self, y: jax.Array, operands: list[jax.Array], args: tuple[Any, ...], kwargs: dict) -> Any:
        batch = len(np.atleast_1d(np.asarray(self.batch_dims, int)))  # they lead in the result, and in the bias
        bias = operands[2].shape
        return (*bias[:batch], *(1,) * (y.ndim - len(bias)), *bias[batch:])


class Einsum(Biased, flax_nn.Einsum):
    """`flax.linen.Einsum` that obeys policies; dtypes as in `Dense`.

    Flax gives this layer no hook for its matmul: one that is a boundary with a wider output_dtype widens its result.
    """

    param_dtype: Any = None

    @flax_nn.nowrap
    def _bias_shape(self, y: jax.Array, operands: list[jax.Array], args: tuple[Any, ...], kwargs: dict) -> Any:
        equation = args[1] if len(args) > 1 else kwargs.get("einsum_str")
        equation = flax_nn.merge_param("einsum_str", self.einsum_str, equation)
        return self._get_bias_shape(equation.replace(" ", ""), *operands[:2])[1]
