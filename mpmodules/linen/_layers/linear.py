"""Dense, DenseGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.layers.operands import (
    DetachedBiases,
    DetachedOperands,
    Operands,
    PromoteToAccumulator,
)
from mpmodules.linen._layer import Layer, declared_field
from mpmodules.linen._resolution import dtype_fields, fields_set
from policy.core.policy import Policy
from policy.core.precedence import Effective


def accumulator_fields(
    layer: Any,
    policy: Policy | None,
    output_dtype: DTypeLike | None,
    hook: str,
    operation: Any,
    scaled: Any = None,
) -> dict:
    """Returns the fields that make a matmul layer return its accumulator, where `output_dtype` is
    wider than compute, or that make it multiply in 8 bits.

    An operation or a `promote_dtype` of the user's own is left in place: then the result is widened
    afterwards.

    Args:
      hook: the name of the field that takes the operation.
      operation: makes the operation from the accumulator's dtype.
      scaled: makes the operation in 8 bits from the policy's `matmul` and the dtype of the result;
        None for one that has none.
    """
    if policy is None or output_dtype is None:
        return {}
    by = None if scaled is None else policy.matmul
    is_wider = functional.is_wider(output_dtype, policy.compute_dtype)
    if not is_wider and by is None:
        return {}
    given = (declared_field(layer, hook), declared_field(layer, f"{hook}_cls"))
    if (
        any(value is not None for value in given)
        or declared_field(layer, "promote_dtype") is not promote_dtype
    ):
        return {}
    returned = output_dtype if is_wider else policy.compute_dtype
    if scaled is not None and by is not None:
        fields = {hook: scaled(by, returned)}
    else:
        fields = {hook: operation(returned)}
    if is_wider:
        fields["promote_dtype"] = PromoteToAccumulator(
            policy.compute_dtype, jnp.dtype(output_dtype)
        )
    return fields


class Biased(Layer):
    """Base class of the matmul and convolution layers: the gradient of a half bias is summed in
    reduction_dtype.
    """

    @flax_nn.nowrap
    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        """Returns the shape in which the bias is added to `y`, or None to leave its gradient to
        Flax.

        Args:
          operands: inputs, kernel and bias as they entered the matmul.
          args, kwargs: the arguments of the call.
        """
        return functional.trailing(y, operands[2])

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        biases = DetachedBiases(promote_dtype)

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if layer.promote_dtype is not promote_dtype:
                return method(layer, *args, **kwargs)
            with fields_set(layer, {"promote_dtype": biases}):
                return method(layer, *args, **kwargs)

        y = super()._call_layer(effective, crosses, run, args, kwargs)
        wide = jnp.float32 if effective.policy is None else effective.policy.reduction_dtype
        return biases.with_gradients(
            y, wide, lambda y, operands: self._bias_shape(y, operands, args, kwargs)
        )


class Accumulating(Biased):
    """Base class of layers whose operation can't be replaced, but takes `preferred_element_type`.

    With that alone, both backward operations would run as float32 times half, or not at all. So
    Flax's method runs on operands without a gradient; the gradient is that of the same method in
    compute_dtype.
    """

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        given = declared_field(self, "promote_dtype") is not promote_dtype
        given = given or declared_field(self, "preferred_element_type") is not None
        in_complex = (
            effective.dtype is not None
            or functional.complex_input((*args, *kwargs.values())) is not None
        )
        wider = (
            crosses
            and policy is not None
            and functional.is_wider(policy.output_dtype, policy.compute_dtype)
        )
        if policy is None or given or in_complex or not wider:
            return super()._call_layer(effective, crosses, method, args, kwargs)
        promote = DetachedOperands(
            PromoteToAccumulator(policy.compute_dtype, jnp.dtype(policy.output_dtype))
        )

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            with fields_set(
                layer, {"promote_dtype": promote, "preferred_element_type": policy.output_dtype}
            ):
                return method(layer, *args, **kwargs)

        y = super()._call_layer(effective, crosses, functools.wraps(method)(run), args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "inputs"}
        operation = functools.partial(self._operation, inspect.unwrap(method), args[1:], rest)
        inputs = jnp.asarray(args[0] if args else kwargs["inputs"], policy.compute_dtype)
        return functional.with_operand_gradients(y, inputs, promote.kernel, operation)

    def _operation(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
        inputs: jax.Array,
        kernel: jax.Array,
    ) -> jax.Array:
        """Runs Flax's method on these operands alone: no bias, no mask, no variable."""
        view: Any = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        fields: dict[str, Any] = {"use_bias": False, "mask": None, "param": lambda *_: kernel}
        view.__dict__.update(
            fields, promote_dtype=lambda *arrays, dtype=None, inexact=True: list(arrays)
        )
        return method(view, inputs, *args, **kwargs)


class Dense(Biased, flax_nn.Dense):
    """`flax.linen.Dense` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result. A Dense that is a boundary with a wider output_dtype returns the matmul's
    accumulator.

    Example:
      >>> layer = linen.Dense(3, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, variables["params"]["kernel"].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    param_dtype: DTypeLike | None = None

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self,
            policy,
            output_dtype,
            "dot_general",
            functional.accumulating_dot_general,
            functional.scaled_dot_general,
        )


class DenseGeneral(Biased, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.DenseGeneral((2, 3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    param_dtype: DTypeLike | None = None

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self,
            policy,
            output_dtype,
            "dot_general",
            functional.accumulating_dot_general,
            functional.scaled_dot_general,
        )

    @flax_nn.nowrap
    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        batch = len(
            np.atleast_1d(np.asarray(self.batch_dims, int))
        )  # they lead in the result, and in the bias
        bias = operands[2].shape
        return (*bias[:batch], *(1,) * (y.ndim - len(bias)), *bias[batch:])


class _AtMatmul(Exception):
    """Ends Flax's method where its operands are known, and hands them on: input, kernel, bias."""

    def __init__(self, operands: Operands):
        super().__init__()
        self.operands = operands


class Einsum(Accumulating, flax_nn.Einsum):
    """`flax.linen.Einsum` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.Einsum((4, 3), "bi,ij->bj", dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    param_dtype: DTypeLike | None = None

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        is_own = (
            effective.dtype is not None
            or functional.complex_input((*args, *kwargs.values())) is not None
            or declared_field(self, "promote_dtype") is not promote_dtype
            or declared_field(self, "preferred_element_type") is not None
        )
        if policy is None or policy.matmul is None or is_own:
            return super()._call_layer(effective, crosses, method, args, kwargs)
        returned = returned_dtype(policy, crosses)
        if not functional.is_wider(returned, policy.compute_dtype):
            returned = policy.compute_dtype
        scaled = functional.scaled_einsum(policy.matmul, returned)

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            def stop(*arrays: Any, dtype: DTypeLike | None = None, inexact: bool = True) -> Any:
                raise _AtMatmul(arrays)

            # Flax calls `jnp.einsum` itself: its method makes the parameters, and no more.
            with fields_set(layer, {"promote_dtype": stop}):
                try:
                    return method(layer, *args, **kwargs)
                except _AtMatmul as at:
                    inputs, kernel, bias = at.operands
            promote = PromoteToAccumulator(policy.compute_dtype, returned)
            biases = DetachedBiases(lambda *arrays, dtype=None, inexact=True: promote(*arrays))
            operands = biases(inputs, kernel, *([] if bias is None else [bias]))
            y = scaled(self._equation(args, kwargs), *operands[:2])
            if bias is not None:
                y += operands[2].reshape(self._bias_shape(y, operands, args, kwargs))
            return biases.with_gradients(
                y,
                policy.reduction_dtype,
                lambda y, operands: self._bias_shape(y, operands, args, kwargs),
            )

        run = functools.wraps(method)(run)
        return Layer._call_layer(self, effective, crosses, run, args, kwargs)

    @flax_nn.nowrap
    def _equation(self, args: tuple[Any, ...], kwargs: dict) -> str:
        equation = args[1] if len(args) > 1 else kwargs.get("einsum_str")
        return flax_nn.merge_param("einsum_str", self.einsum_str, equation).replace(" ", "")

    @flax_nn.nowrap
    def _bias_shape(
        self, y: jax.Array, operands: Operands, args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        return self._get_bias_shape(self._equation(args, kwargs), *operands[:2])[1]
