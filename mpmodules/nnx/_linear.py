"""Linear, LinearGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mpmodules import functional
from mpmodules.nnx._layer import Layer, in_complex, viewed
from policy.casting import cast_array


@dataclasses.dataclass(frozen=True)
class PromoteToAccumulator:
    """A `promote_dtype` that casts the operands to compute_dtype and a bias to the accumulator's dtype."""

    compute_dtype: np.dtype
    accumulator_dtype: np.dtype

    def __call__(self, arrays: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
        inputs, kernel, *bias = arrays
        operands = promote_dtype((inputs, kernel), dtype=self.compute_dtype)
        return (*operands, *(None if b is None else jnp.asarray(b, self.accumulator_dtype) for b in bias))


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    One that is a boundary with a wider output_dtype returns its accumulator, with both backward operations in
    compute_dtype. A `preferred_element_type` given by the user is the accumulator's dtype; the result still has the
    policy's. An operation or a `promote_dtype` of the user's own is left in place.
    """

    # The attribute that takes the operation, the operation that Flax runs by default, and ours that accumulates.
    _operation: ClassVar[str | None] = None
    _default_operations: ClassVar[tuple[Any, ...]] = ()
    _accumulating: ClassVar[Callable[..., Any]]

    def _call_layer(
        self, crosses: bool, method: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        policy = self.dtype_policy
        preferred = getattr(self, "preferred_element_type", None)
        view = in_complex(self, args, kwargs)
        if view is not None:
            return method(view, *args, **kwargs)
        if self.promote_dtype is not promote_dtype:
            return method(self, *args, **kwargs)
        if policy is None or self.dtype != policy.compute_dtype:
            return self._call_biased(method, args, kwargs)
        output_dtype = self._returns(crosses)
        wide = output_dtype if preferred is None else preferred
        accumulating: Any = getattr(self, "_call_accumulating", None)
        if accumulating is not None and functional.is_wider(wide, policy.compute_dtype):
            return cast_array(accumulating(wide, method, args, kwargs), output_dtype)
        if preferred is not None:
            promote = PromoteToAccumulator(policy.compute_dtype, jnp.dtype(preferred))
            return cast_array(method(viewed(self, promote_dtype=promote), *args, **kwargs), output_dtype)
        if not (functional.is_wider(output_dtype, policy.compute_dtype) and self._has_default_operation()):
            return self._call_biased(method, args, kwargs)
        view = viewed(
            self,
            promote_dtype=PromoteToAccumulator(policy.compute_dtype, output_dtype),
            **{str(self._operation): type(self)._accumulating(output_dtype)},
        )
        return method(view, *args, **kwargs)

    def _call_biased(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs Flax's method; the gradient of a half bias is summed in reduction_dtype."""
        stored: list[tuple[jax.Array, tuple[jax.Array, ...]]] = []

        def promote(arrays: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
            promoted = promote_dtype(arrays, dtype=dtype, inexact=inexact)
            if len(promoted) < 3 or promoted[2] is None or not functional.is_half(promoted[2].dtype):
                return promoted
            stored.append((arrays[2], promoted))
            return (*promoted[:2], lax.stop_gradient(promoted[2]))

        y = method(viewed(self, promote_dtype=promote), *args, **kwargs)
        for bias, operands in stored:
            wide = jnp.float32 if self.dtype_policy is None else self.dtype_policy.reduction_dtype
            y = functional.with_bias_gradient(y, bias, self._bias_shape(y, operands, args, kwargs), wide)
        return y

    def _bias_shape(
        self, y: jax.Array, operands: tuple[jax.Array, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        """Returns the shape in which the bias is added to `y`.

        Args:
          operands: inputs, kernel and bias as they entered the matmul.
          args, kwargs: the arguments of the call.
        """
        return functional.trailing(y, operands[2])

    def _has_default_operation(self) -> bool:
        if self._operation is None or getattr(self, "dot_general_cls", None) is not None:
            return False
        return any(getattr(self, self._operation) is default for default in self._default_operations)


class Linear(Matmul, flax_nnx.Linear):
    """`flax.nnx.Linear` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype, and so is the result.
    """

    _operation = "dot_general"
    _default_operations = (lax.dot_general,)
    _accumulating = staticmethod(functional.accumulating_dot_general)


class LinearGeneral(Matmul, flax_nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` that obeys policies; dtypes as in `Linear`."""

    _operation = "dot_general"
    _default_operations = (None, lax.dot_general)
    _accumulating = staticmethod(functional.accumulating_dot_general)

    def _bias_shape(
        self, y: jax.Array, operands: tuple[jax.Array, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        bias, batch = operands[2].shape, len(self.batch_axis)  # batch axes lead in the result, and in the bias
        return (*bias[:batch], *(1,) * (y.ndim - len(bias)), *bias[batch:])


class Einsum(Matmul, flax_nnx.Einsum):
    """`flax.nnx.Einsum` that obeys policies; dtypes as in `Linear`."""

    _operation = "einsum_op"
    _default_operations = (jnp.einsum,)
    _accumulating = staticmethod(functional.accumulating_einsum)

    def _bias_shape(
        self, y: jax.Array, operands: tuple[jax.Array, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        equation = args[1] if len(args) > 1 else kwargs.get("einsum_str")
        equation = self.einsum_str if equation is None else equation
        return tuple(self._infer_broadcasted_bias_shape(str(equation).replace(" ", ""), *operands[:2]))
