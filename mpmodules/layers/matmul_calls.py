"""Matmul, convolution and embedding layers: how they compute, alike in both APIs.

The functions take a layer of either API and read its options, which have the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as linen_promote_dtype
from flax.linen.linear import canonicalize_padding
from flax.nnx.nn.dtypes import promote_dtype as nnx_promote_dtype
from jax import lax
from jax.typing import DTypeLike

from mpmodules.calls.boundary import Numerics
from mpmodules.calls.classes import layer_class
from mpmodules.functions.functional import add_bias, is_wider, trailing, widen
from policy.core.arrays import cast_array
from policy.core.einsums import DimensionNumbers, dot_of_einsum
from policy.core.scope import current_scope, enter
from policy.eight_bits import scaled_convolution, scaled_matmul
from policy.functions.linear_cross_entropy import linear_softmax_cross_entropy
from policy.functions.reductions import accumulating
from policy.quantized import products
from policy.quantized.array import QuantizedArray

Array = jax.Array


def promotes_as_flax(layer: Any) -> bool:
    """Returns whether a layer has no `promote_dtype` of the user's own, with which it computes as
    Flax has it.
    """
    promote = getattr(layer, "promote_dtype", None)
    return promote in (None, linen_promote_dtype, nnx_promote_dtype)


# --------------------------------------------------------------------------------------------------
# Products
# --------------------------------------------------------------------------------------------------


def promoted(layer: Any, promote: Callable[..., Any], inputs: Array, kernel: Any, bias: Any) -> Any:
    """Returns inputs, kernel and bias as a layer's `promote_dtype` returns them, the kernel masked
    in a layer that has a mask; one stored as codes is read in the dtype of the inputs.

    Args:
      layer: the layer.
      promote: its `promote_dtype`, for the operands alone.
      inputs, kernel, bias: as they are stored.
    """
    kernel = _masked(layer, kernel)
    if not isinstance(kernel, QuantizedArray):
        return promote(inputs, kernel, bias)
    if not promotes_as_flax(layer):
        return promote(inputs, kernel.widened(), bias)
    inputs, _, bias = promote(inputs, None, bias)
    return inputs, kernel, bias


def _masked(layer: Any, kernel: Any) -> Any:
    """Multiplies a kernel by the layer's mask, if it has one."""
    if getattr(layer, "mask", None) is None:
        return kernel
    kernel = jnp.asarray(kernel)
    if layer.mask.shape != kernel.shape:
        raise ValueError(
            "Mask needs to have the same shape as weights. "
            f"Shapes are: {layer.mask.shape}, {kernel.shape}"
        )
    return kernel * layer.mask


class Product:
    """The product of a call: the operands as they are multiplied, and the operation that does it.

    Under a policy Flax's own operation returns its accumulator where the result is to be wider than
    the operands, and multiplies in 8 bits where the policy says so; an operation of the user's own
    is called as Flax calls it. A `preferred_element_type` is the accumulator's dtype, and that of
    the result where it is wider than the policy's.

    Args:
      layer: its `preferred_element_type` and its operation are read, where it has any.
      promoted: inputs, kernel and bias as the layer's `promote_dtype` returned them.
      bias: as it is stored, or None.
      operation: Flax's own.
      accumulates: whether Flax's operation takes `preferred_element_type`.
    """

    def __init__(
        self,
        layer: Any,
        promoted: Sequence[Any],
        bias: Array | None,
        operation: Callable[..., Array],
        *,
        accumulates: bool = True,
    ):
        given, make = (getattr(layer, f"{layer._hook}{end}", None) for end in ("", "_cls"))
        given = given if make is None else make()
        self.inputs, self.kernel, self.bias = promoted
        self.operation = operation if given is None else given
        is_plain = promotes_as_flax(layer)
        self.numerics: Numerics = layer._numerics if is_plain else Numerics()
        self.preferred = getattr(layer, "preferred_element_type", None)
        self.stored_bias: Any = bias if is_plain else self.bias
        self.is_flaxs, self.accumulator_dtype = self.operation is operation, None
        result = self.numerics.result_dtype
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

        wide, is_8_bit = self.accumulator_dtype, self.numerics.matmul is not None
        if isinstance(self.kernel, QuantizedArray):
            if not is_8_bit:
                return _of_codes(self, bilinear, before, args, options)
            self.kernel = self.kernel.astype(self.inputs.dtype).widened()
        if is_8_bit and self.is_flaxs and self.operation in _IN_8_BITS:
            product = _in_8_bits(self, wide or self.inputs.dtype, before, args, options)
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
            wide = self.numerics.reduction_dtype
            y = add_bias(y, self.bias, shape, stored=self.stored_bias, reduction_dtype=wide)
        result, preferred = self.numerics.result_dtype, self.preferred
        if preferred is None or result is None or is_wider(jnp.dtype(preferred), result):
            return y
        return cast_array(y, result)


def _of_codes(
    product: Product,
    operation: Callable[..., Array],
    before: Sequence[Any],
    args: Sequence[Any],
    options: dict[str, Any],
) -> Array:
    """Computes a product with a kernel that is stored as codes."""
    x, wide = product.inputs, product.accumulator_dtype
    kernel: Any = product.kernel
    preferred = product.preferred if wide is None else wide
    found = _as_dot(product, before, args, options)
    if found is None:
        return products.bilinear_of_codes(operation, x, kernel, accumulator_dtype=preferred)
    y = products.dot_general(x, kernel, found[0], accumulator_dtype=preferred, **options)
    return y if found[1] is None else jnp.transpose(y, found[1])


def _as_dot(
    product: Product, before: Sequence[Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[DimensionNumbers, Sequence[int] | None] | None:
    """Returns the dimension numbers of a product, and the order of its result's axes, or None where
    that is the matmul's; None of a product that is no matmul.
    """
    x, kernel = product.inputs, product.kernel
    if product.operation is lax.dot_general:
        return args[0], None
    if product.operation is inner_products:
        return (((x.ndim - 1,), (1,)), ((), ())), None
    # With a sharding: the axes of an einsum's result stand in another order than its matmul's.
    is_einsum = product.operation is jnp.einsum and options.get("out_sharding") is None
    return dot_of_einsum(before[0], x.ndim, kernel.ndim) if is_einsum else None


_IN_8_BITS: tuple[Any, ...] = (lax.dot_general, jnp.einsum, lax.conv_general_dilated)


def _in_8_bits(
    product: Product, dtype: DTypeLike, before: Sequence[Any], args: Sequence[Any], options: Any
) -> Array | None:
    """Computes one of `_IN_8_BITS`, called as ``operation(*before, lhs, rhs, *args, **options)``;
    None of operands that it does not take.
    """
    lhs, rhs, sharding = product.inputs, product.kernel, options.get("out_sharding")
    by: Any = product.numerics.matmul
    if product.operation is not lax.conv_general_dilated:
        found = _as_dot(product, before, args, options)
        if found is None:
            return None
        y = scaled_matmul.scaled_dot_general(
            lhs, rhs, found[0], by, dtype=dtype, out_sharding=sharding
        )
        return y if found[1] is None else jnp.transpose(y, found[1])
    if not scaled_convolution.may_run_in_8_bits(lhs, rhs, by, out_sharding=sharding):
        return None
    windows = {name: x for name, x in options.items() if name not in ("precision", "out_sharding")}
    windows |= dict(zip(("window_strides", "padding"), args, strict=True))
    return scaled_convolution.scaled_conv(lhs, rhs, by, **windows).astype(dtype)


def may_multiply_in_8_bits(module: Any) -> bool:
    """Returns whether ``m=`` reaches the matmuls of a layer, or of a module's layers."""
    layer = layer_class(type(module))
    if layer is None or not layer._is_layer:
        return True
    operation, make = (getattr(module, f"{layer._hook}{end}", None) for end in ("", "_cls"))
    is_known = make is None and (operation is None or operation in _IN_8_BITS)
    return bool(layer._hook) and is_known


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


def convolve(
    layer: Any, inputs: Array, product_of: Callable[[Array], Product], **options: Any
) -> Array:
    """Convolves inputs (batch..., spatial..., in), and adds the bias.

    Args:
      layer: its windows and precision are read.
      inputs: of the layer.
      product_of: makes the product of inputs (batch, spatial..., in), padded where `lax` has no
        name for it.
      **options: of the operation, beside those of the windows.
    """
    flat, restored = one_batch_axis(inputs, len(kernel_size_of(layer)))
    padded, windows, dilations = windows_of(layer, flat)
    product = product_of(padded)
    y = product.multiply(*windows, **dilations, **options, precision=layer.precision)
    return restored(product.finish(y))


def windows_of(layer: Any, inputs: Array) -> tuple[Array, tuple[Any, Any], dict[str, Any]]:
    """Returns the windows of a convolution of inputs (batch, spatial..., features).

    Returns:
      The inputs, padded where `lax` has no name for it; strides and padding as
      `lax.conv_general_dilated` takes them; and its other arguments that have to do with windows.
    """
    size = kernel_size_of(layer)
    rank = len(size)
    dilation = each(layer.kernel_dilation, rank)
    padding: Any = canonicalize_padding(layer.padding, rank)
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
    kernel_axes = (rank + 1, rank, *range(rank))
    options = {
        "lhs_dilation": each(layer.input_dilation, rank),
        "rhs_dilation": dilation,
        "dimension_numbers": lax.ConvDimensionNumbers(channels_last, kernel_axes, channels_last),
    }
    return inputs, (each(layer.strides, rank), padding), options


def convolve_transposed(layer: Any, inputs: Array, product_of: Callable[[Array], Product]) -> Array:
    """Convolves inputs (batch..., spatial..., in) as a convolution's transpose, and adds the bias;
    arguments as in `convolve`.
    """
    rank = len(kernel_size_of(layer))
    flat, restored = one_batch_axis(inputs, rank)
    product, strides = product_of(flat), each(layer.strides, rank)
    padding = canonicalize_padding(layer.padding, rank)
    y = product.multiply(
        strides,
        "VALID" if padding == "CIRCULAR" else padding,
        rhs_dilation=each(layer.kernel_dilation, rank),
        transpose_kernel=layer.transpose_kernel,
        precision=layer.precision,
    )
    if padding == "CIRCULAR":
        periods = [n * step for n, step in zip(flat.shape[1:-1], strides, strict=False)]
        y = _wrapped(y, periods, more_on_the_right=layer.transpose_kernel)
    return restored(product.finish(y))


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


def embedded(layer: Any, table: Array, tokens: Array, out_sharding: Any = None) -> Array:
    """Looks up tokens in a table (tokens, features), and casts afterwards.

    The gradient of a token is summed over its occurrences in reduction_dtype: a table stored in
    half is widened first, which XLA fuses into the lookup.

    Args:
      layer: its `dtype` is that of the result without a policy; None is the table's.
      table: as it is stored, or as a `promote_dtype` of the user's own returned it.
      tokens: integers.
      out_sharding: the sharding of the result along explicit axes.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError("Input type must be an integer or unsigned integer.")
    if not promotes_as_flax(layer):
        return _look_up(table, tokens, out_sharding)
    numerics: Numerics = layer._numerics
    if isinstance(table, QuantizedArray):
        y = products.rows(table, tokens)
    else:
        y = _look_up(widen(table, numerics.reduction_dtype), tokens, out_sharding)
    if numerics.result_dtype is not None:
        return cast_array(y, numerics.result_dtype)
    dtype = table.dtype if layer.dtype is None else jnp.dtype(layer.dtype)
    return y if y.dtype == dtype else y.astype(dtype)


def _look_up(table: Array, tokens: Array, out_sharding: Any) -> Array:
    """Returns the rows of a table (tokens, features); all of them are one where it has one."""
    if table.shape[0] == 1:
        return jnp.broadcast_to(table, (*tokens.shape, table.shape[1]))
    take = lambda table, tokens: jnp.take(table, tokens, axis=0)  # noqa: E731
    if out_sharding is not None:
        take = jax.sharding.auto_axes(out_sharding=out_sharding)(take)
    return take(table, tokens)


def inner_products(query: Array, table: Array, **options: Any) -> Array:
    """Multiplies a query (..., features) by each row of a table (tokens, features)."""
    return jnp.dot(query, table.T, **options)


def attended_loss(
    layer: Any,
    promote: Callable[..., Any],
    query: Array,
    table: Array,
    labels: Array,
    options: dict[str, Any],
) -> Array:
    """Computes the cross-entropy of `inner_products`, which stay out of memory.

    As these, it is not in 8 bits. Under a policy the gradient of the table is that of the stored
    one.

    Args:
      layer: its policy is read.
      promote: the layer's `promote_dtype`, for the operands alone.
      query: (..., features).
      table: (tokens, features), as it is stored.
      labels: (...) integers.
      options: of `linear_softmax_cross_entropy`.
    """
    scope = current_scope()
    policy = scope.policy
    if isinstance(table, QuantizedArray) and layer.dtype is not None:
        table = table.astype(layer.dtype)
    table = jnp.asarray(table)
    if policy is None or not promotes_as_flax(layer) or layer._numerics.result_dtype is None:
        query, table = promote(query, table)
        policy = None
    else:
        policy = policy.replace(compute_dtype=layer.dtype, matmul=None)
    with enter(dataclasses.replace(scope, policy=policy)):
        return linear_softmax_cross_entropy(query, table, labels, axis=0, **options)
