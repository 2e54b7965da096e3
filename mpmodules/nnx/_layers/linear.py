"""Linear, LinearGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.layers.operands import DetachedBiases, Operands, PromoteToAccumulator
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._resolution import in_complex, viewed
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    One that is a boundary with a wider output_dtype returns its accumulator, with both backward
    operations in compute_dtype. A `preferred_element_type` given by the user is the accumulator's
    dtype; the result still has the policy's. An operation or a `promote_dtype` of the user's own is
    left in place.
    """

    # The attribute that takes the operation, the operation that Flax runs by default, and ours that
    # accumulates.
    _operation: ClassVar[str | None] = None
    _default_operations: ClassVar[tuple[Any, ...]] = ()
    _accumulating: ClassVar[Callable[..., Any]]
    # The operation in 8 bits, from the policy's `matmul` and the result's dtype; None without one.
    _scaled: ClassVar[Callable[..., Any] | None] = None

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        preferred = getattr(self, "preferred_element_type", None)
        view = in_complex(self, args, kwargs)
        if view is not None:
            return method(view, *args, **kwargs)
        if self.promote_dtype is not promote_dtype:
            return method(self, *args, **kwargs)
        if policy is None or self.dtype != policy.compute_dtype:
            return self._call_biased(policy, method, args, kwargs)
        output_dtype = returned_dtype(policy, crosses)
        wide = output_dtype if preferred is None else preferred
        scaled = type(self)._scaled
        if policy.matmul is not None and scaled is not None and self._has_default_operation():
            is_wider = functional.is_wider(wide, policy.compute_dtype)
            returned = wide if is_wider else policy.compute_dtype
            view = viewed(self, **{str(self._operation): scaled(policy.matmul, returned)})
            if not is_wider:
                return self._call_biased(policy, method, args, kwargs, view)
            promote = PromoteToAccumulator(policy.compute_dtype, jnp.dtype(wide))
            return cast_array(
                method(viewed(view, promote_dtype=promote), *args, **kwargs), output_dtype
            )
        accumulating: Any = getattr(self, "_call_accumulating", None)
        if accumulating is not None and functional.is_wider(wide, policy.compute_dtype):
            return cast_array(accumulating(policy, wide, method, args, kwargs), output_dtype)
        if preferred is not None:
            promote = PromoteToAccumulator(policy.compute_dtype, jnp.dtype(preferred))
            return cast_array(
                method(viewed(self, promote_dtype=promote), *args, **kwargs), output_dtype
            )
        if not (
            functional.is_wider(output_dtype, policy.compute_dtype)
            and self._has_default_operation()
        ):
            return self._call_biased(policy, method, args, kwargs)
        view = viewed(
            self,
            promote_dtype=PromoteToAccumulator(policy.compute_dtype, output_dtype),
            **{str(self._operation): type(self)._accumulating(output_dtype)},
        )
        return method(view, *args, **kwargs)

    def _call_biased(
        self,
        policy: Policy | None,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
        view: Any = None,
    ) -> Any:
        """Runs Flax's method, on a view of the layer if one is given.

        The gradient of a half bias is summed in reduction_dtype.
        """
        biases = DetachedBiases(promote_dtype)
        y = method(viewed(self if view is None else view, promote_dtype=biases), *args, **kwargs)
        wide = jnp.float32 if policy is None else policy.reduction_dtype
        return biases.with_gradients(
            y, wide, lambda y, operands: self._bias_shape(y, operands, args, kwargs)
        )

    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
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
        return any(
            getattr(self, self._operation) is default for default in self._default_operations
        )


class Linear(Matmul, flax_nnx.Linear):
    """`flax.nnx.Linear` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result.

    Example:
      >>> layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype, layer.kernel[...].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    _operation = "dot_general"
    _default_operations = (lax.dot_general,)
    _accumulating = staticmethod(functional.accumulating_dot_general)
    _scaled = staticmethod(functional.scaled_dot_general)


class LinearGeneral(Matmul, flax_nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    _operation = "dot_general"
    _default_operations = (None, lax.dot_general)
    _accumulating = staticmethod(functional.accumulating_dot_general)
    _scaled = staticmethod(functional.scaled_dot_general)

    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
    ) -> tuple[int, ...]:
        bias, batch = (
            operands[2].shape,
            len(self.batch_axis),
        )  # batch axes lead in the result, and in the bias
        return (*bias[:batch], *(1,) * (y.ndim - len(bias)), *bias[batch:])


class Einsum(Matmul, flax_nnx.Einsum):
    """`flax.nnx.Einsum` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.Einsum("bi,ij->bj", (4, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    _operation = "einsum_op"
    _default_operations = (jnp.einsum,)
    _accumulating = staticmethod(functional.accumulating_einsum)
    _scaled = staticmethod(functional.scaled_einsum)

    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
    ) -> tuple[int, ...]:
        equation = args[1] if len(args) > 1 else kwargs.get("einsum_str")
        equation = self.einsum_str if equation is None else equation
        return tuple(
            self._infer_broadcasted_bias_shape(str(equation).replace(" ", ""), *operands[:2])
        )
