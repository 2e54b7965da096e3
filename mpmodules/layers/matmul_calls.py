"""Matmul, convolution and embedding layers: how they compute, alike in both wings.

The functions take a layer of either wing and read its options, which have the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.linear import canonicalize_padding
from jax import lax
from jax.typing import DTypeLike

from mpmodules.calls.boundary import LayerCall
from mpmodules.functions.functional import add_bias, is_wider, trailing, widen
from policy.core.arrays import cast_array
from policy.core.dtypes import ScaledMatmul
from policy.eight_bits import scaled_convolution, scaled_matmul
from policy.functions.reductions import accumulating

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The numerics that a policy asks of a layer in one call.

    Attributes:
      result_dtype: the dtype of the result; None of a call without a policy, which is Flax's own.
      reduction_dtype: the dtype in which the gradients of biases and of embeddings are summed.
      matmul: the 8-bit matmuls; None multiplies in the operands' dtype.
    """

    result_dtype: np.dtype | None = None
    reduction_dtype: DTypeLike = jnp.float32
    matmul: ScaledMatmul | None = None


def numerics_of(call: LayerCall) -> Numerics:
    """Returns how a layer computes in a call."""
    policy = call.policy
    if policy is None:
        return Numerics()
    return Numerics(call.returned_dtype, policy.reduction_dtype, policy.matmul)


# --------------------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------------------


class Product:
    """The product of a call: the operands as they are multiplied, and the operation that does it.

    Under a policy Flax's own operation returns its accumulator where the result is to be wider than
    the operands, and multiplies in 8 bits where the policy says so; an operation of the user's own
    is called as Flax calls it. A `preferred_element_type` is the accumulator's dtype; the result
    has the policy's.

    Args:
      layer: its `preferred_element_type` and its operation are read, where it has any.
      promoted: inputs, kernel and bias as the layer's `promote_dtype` returned them.
      bias: as it is stored, or None.
      operation: Flax's own.
      hook: the name of the layer's attribute for an operation of the user's own.
      numerics: how the policy has the layer compute.
      accumulates: whether Flax's operation takes `preferred_element_type`.
    """

    def __init__(
        self,
        layer: Any,
        promoted: Sequence[Any],
        bias: Array | None,
        operation: Callable[..., Array],
        hook: str = "",
        *,
        numerics: Numerics,
        accumulates: bool = True,
    ):
        given, make = (getattr(layer, name, None) for name in (hook, f"{hook}_cls"))
        given = given if make is None else make()
        self.inputs, self.kernel, self.bias = promoted
        self.operation = operation if given is None else given
        self.numerics = numerics
        self.preferred = getattr(layer, "preferred_element_type", None)
        self.stored_bias: Any = bias
        self.is_flaxs, self.accumulator_dtype = self.operation is operation, None
        result = numerics.result_dtype
        if result is None:
            return
        wide = result if self.preferred is None else jnp.dtype(self.preferred)
        if self.is_flaxs and accumulates and is_wider(wide, self.inputs.dtype):
            self.accumulator_dtype = wide
        if bias is not None and (self.accumulator_dtype or self.preferred) is not None:
            self.bias = jnp.asarray(bias, wide)

    def multiply(self, *args: Any, before: tuple[Any, ...] = (), **options: Any) -> Array:
        """Returns ``operation(*before, inputs, kernel, *args, **options)``, its accumulator where
        that is asked for.
        """

        def bilinear(lhs: Array, rhs: Array, **preferred: Any) -> Array:
            return self.operation(*before, lhs, rhs, *args, **options, **preferred)

        by, wide = self.numerics.matmul, self.accumulator_dtype
        if by is not None and self.is_flaxs and self.operation in _IN_8_BITS:
            run, dtype = _IN_8_BITS[self.operation], wide or self.inputs.dtype
            product = run(*before, self.inputs, self.kernel, *args, by=by, dtype=dtype, **options)
            if product is not None:
                return product
        if wide is not None:
            return accumulating(bilinear, wide)(self.inputs, self.kernel)
        preferred = self.preferred
        given = {} if preferred is None else {"preferred_element_type": preferred}
        return bilinear(self.inputs, self.kernel, **given)

    def finish(self, y: Array, shape: Sequence[int] | None = None) -> Array:
        """Returns the layer's result: `y` and the bias, in the shape in which it is added.

        By default it is added over the last axes.
        """
        if self.bias is not None:
            shape = trailing(y, self.bias) if shape is None else shape
            reduction_dtype = self.numerics.reduction_dtype
            y = add_bias(
                y, self.bias, shape, stored=self.stored_bias, reduction_dtype=reduction_dtype
            )
        result = self.numerics.result_dtype
        return y if self.preferred is None or result is None else cast_array(y, result)


def _dot_general_in_8_bits(
    lhs: Array,
    rhs: Array,
    dimension_numbers: scaled_matmul.DimensionNumbers,
    *,
    by: ScaledMatmul,
    dtype: DTypeLike,
    out_sharding: Any = None,
    **_: Any,
) -> Array:
    return scaled_matmul.scaled_dot_general(
        lhs, rhs, dimension_numbers, by, dtype=dtype, out_sharding=out_sharding
    )


def _einsum_in_8_bits(
    subscripts: str,
    lhs: Array,
    rhs: Array,
    *,
    by: ScaledMatmul,
    dtype: DTypeLike,
    out_sharding: Any = None,
    **_: Any,
) -> Array | None:
    # The axes of an einsum's result stand in another order than its matmul's.
    if out_sharding is not None:
        return None
    return scaled_matmul.scaled_einsum(subscripts, lhs, rhs, by, dtype=dtype)


def _conv_in_8_bits(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: Any,
    *,
    by: ScaledMatmul,
    dtype: DTypeLike,
    precision: Any = None,
    out_sharding: Any = None,
    **options: Any,
) -> Array | None:
    if not scaled_convolution.may_run_in_8_bits(lhs, rhs, out_sharding=out_sharding):
        return None
    options |= {"window_strides": window_strides, "padding": padding}
    return scaled_convolution.scaled_conv(lhs, rhs, by, **options).astype(dtype)


# Each returns None of operands that it does not take.
_IN_8_BITS: dict[Any, Callable[..., Array | None]] = {
    lax.dot_general: _dot_general_in_8_bits,
    jnp.einsum: _einsum_in_8_bits,
    lax.conv_general_dilated: _conv_in_8_bits,
}


def may_multiply_in_8_bits(operation: Any, operation_cls: Any) -> bool:
    """Returns whether ``m=`` reaches a layer with these options; None stands for Flax's own."""
    return operation_cls is None and (operation is None or operation in _IN_8_BITS)


# --------------------------------------------------------------------------------------------------
# Matmuls
# --------------------------------------------------------------------------------------------------


def linear(product: Product, **options: Any) -> Array:
    """Multiplies the last axis of the inputs by a kernel (in, out), and adds a bias (out,)."""
    contracted = ((product.inputs.ndim - 1,), (0,))
    return product.finish(product.multiply((contracted, ((), ())), **options))


def linear_general(
    product: Product, axis: Sequence[int], batch_axis: Sequence[int], **options: Any
) -> Array:
    """Contracts the axes `axis` of the inputs with a kernel (batch..., in..., out...).

    Args:
      product: its bias is (batch..., out...).
      axis: the axes contracted.
      batch_axis: the leading axes that have kernels of their own.
    """
    ndim, batches = product.inputs.ndim, len(batch_axis)
    axis, batch = (
        tuple(sorted(i if i >= 0 else ndim + i for i in axes)) for axes in (axis, batch_axis)
    )
    contracted = tuple(range(batches, batches + len(axis)))
    y = product.multiply(((axis, contracted), (batch, tuple(range(batches)))), **options)
    if product.bias is None:
        return product.finish(y)
    bias = product.bias.shape  # the batch leads in it, as in the result
    ones = (1,) * (y.ndim - len(bias))
    return product.finish(y, (*bias[:batches], *ones, *bias[batches:]))


# --------------------------------------------------------------------------------------------------
# Convolutions
# --------------------------------------------------------------------------------------------------


def each(value: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Returns an option for each of `rank` spatial axes; None is 1."""
    value = 1 if value is None else value
    return (value,) * rank if isinstance(value, int) else tuple(value)


def kernel_size_of(layer: Any) -> tuple[int, ...]:
    """Returns a layer's kernel size for each spatial axis."""
    size = layer.kernel_size
    return (size,) if isinstance(size, int) else tuple(size)


def one_batch_axis(inputs: Array, rank: int) -> tuple[Array, Callable[[Array], Array]]:
    """Returns inputs (batch, spatial..., features), and a function that restores their batch axes
    in a result.
    """
    batch = inputs.shape[: inputs.ndim - rank - 1]
    if len(batch) == 1:
        return inputs, lambda y: y
    flat = jnp.reshape(inputs, (-1, *inputs.shape[len(batch) :]))
    return flat, lambda y: jnp.reshape(y, (*batch, *y.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a convolution's call.

    Attributes:
      inputs: (batch, spatial..., features), padded where `lax` has no name for it.
      strides, padding: as `lax.conv_general_dilated` takes them.
      options: the rest of its arguments that have to do with windows, by name.
    """

    inputs: Array
    strides: tuple[int, ...]
    padding: Any
    options: dict[str, Any]


def windows_of(layer: Any, inputs: Array) -> Windows:
    """Returns the windows of a convolution of inputs (batch, spatial..., features)."""
    size, padding = kernel_size_of(layer), None
    rank = len(size)
    dilation = each(layer.kernel_dilation, rank)
    padding = canonicalize_padding(layer.padding, rank)
    dilated = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=False)]
    if padding in ("CIRCULAR", "REFLECT"):
        around = [((k - 1) // 2, k // 2) for k in dilated]
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        inputs, padding = jnp.pad(inputs, [(0, 0), *around, (0, 0)], mode=mode), "VALID"
    elif padding == "CAUSAL":
        if rank != 1:
            raise ValueError("Causal padding is only implemented for 1D convolutions.")
        inputs, padding = jnp.pad(inputs, [(0, 0), (dilated[0] - 1, 0), (0, 0)]), "VALID"
    spatial = tuple(range(1, rank + 1))
    channels_last = (0, rank + 1, *spatial)
    options = {
        "lhs_dilation": each(layer.input_dilation, rank),
        "rhs_dilation": dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(
            channels_last, (rank + 1, rank, *range(rank)), channels_last
        ),
    }
    return Windows(inputs, each(layer.strides, rank), padding, options)


def masked(layer: Any, kernel: Array) -> Array:
    """Multiplies a kernel by the layer's mask, if it has one."""
    if layer.mask is None:
        return kernel
    if layer.mask.shape != kernel.shape:
        raise ValueError(
            "Mask needs to have the same shape as weights. "
            f"Shapes are: {layer.mask.shape}, {kernel.shape}"
        )
    return kernel * layer.mask


def convolve_transposed(layer: Any, product: Product) -> Array:
    """Runs a transposed convolution of inputs (batch, spatial..., features)."""
    size = kernel_size_of(layer)
    strides = each(layer.strides, len(size))
    padding = canonicalize_padding(layer.padding, len(size))
    y = product.multiply(
        strides,
        "VALID" if padding == "CIRCULAR" else padding,
        rhs_dilation=each(layer.kernel_dilation, len(size)),
        transpose_kernel=layer.transpose_kernel,
        precision=layer.precision,
    )
    if padding == "CIRCULAR":
        spatial = product.inputs.shape[1:-1]
        periods = [n * stride for n, stride in zip(spatial, strides, strict=False)]
        y = _wrapped(y, periods, more_on_the_right=layer.transpose_kernel)
    return product.finish(y)


def _wrapped(y: Array, periods: Sequence[int], *, more_on_the_right: bool) -> Array:
    """Sums the periods of a result along each spatial axis, whose padding is to be circular.

    As in Flax the padding to whole periods is divided between both sides, and the odd one is on the
    left unless the kernel is transposed.
    """
    missing = [
        -(n - period) % (2 * period) for n, period in zip(y.shape[1:-1], periods, strict=True)
    ]
    sides = [(n // 2, (n + 1) // 2) for n in missing]
    if not more_on_the_right:
        sides = [(right, left) for left, right in sides]
    y = jnp.pad(y, [(0, 0), *sides, (0, 0)])
    for axis, period in enumerate(periods, 1):
        y = y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
    return y


# --------------------------------------------------------------------------------------------------
# Embeddings
# --------------------------------------------------------------------------------------------------


def embedded(
    table: Array,
    tokens: Array,
    *,
    numerics: Numerics,
    dtype: DTypeLike | None,
    out_sharding: Any = None,
) -> Array:
    """Looks up tokens in a table (tokens, features), and casts afterwards.

    The gradient of a token is summed over its occurrences in reduction_dtype: a table stored in
    half is widened first, which XLA fuses into the lookup.

    Args:
      table: as it is stored.
      tokens: integers.
      numerics: how the policy has the layer compute.
      dtype: the dtype of the result without a policy; None is the table's.
      out_sharding: the sharding of the result along explicit axes.
    """
    y = look_up(widen(table, numerics.reduction_dtype), tokens, out_sharding)
    if numerics.result_dtype is not None:
        return cast_array(y, numerics.result_dtype)
    dtype = table.dtype if dtype is None else jnp.dtype(dtype)
    return y if y.dtype == dtype else y.astype(dtype)


def look_up(table: Array, tokens: Array, out_sharding: Any = None) -> Array:
    """Returns the rows of a table (tokens, features); all of them are one where it has one."""
    if table.shape[0] == 1:
        return jnp.broadcast_to(table, (*tokens.shape, table.shape[1]))
    take = lambda table, tokens: jnp.take(table, tokens, axis=0)  # noqa: E731
    if out_sharding is not None:
        take = jax.sharding.auto_axes(out_sharding=out_sharding)(take)
    return take(table, tokens)


def require_tokens(tokens: Array) -> None:
    """Refuses tokens that are no integers."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError("Input type must be an integer or unsigned integer.")


def inner_products(query: Array, table: Array, **options: Any) -> Array:
    """Multiplies a query (..., features) by each row of a table (tokens, features)."""
    return jnp.dot(query, table.T, **options)
