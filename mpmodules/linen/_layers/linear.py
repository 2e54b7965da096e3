"""Matmuls, convolutions and embeddings in compute_dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax import lax
from jax.typing import DTypeLike

from mpmodules.layers import matmul_calls
from mpmodules.layers.matmul_calls import Product
from mpmodules.linen._layer import Layer


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    The gradient of a half bias is summed in reduction_dtype.
    """

    param_dtype: DTypeLike | None = None

    @flax_nn.nowrap
    def _kernel(self, shape: Sequence[int]) -> jax.Array:
        """Makes the kernel."""
        return self.param("kernel", self.kernel_init, shape, self.param_dtype)

    @flax_nn.nowrap
    def _bias(self, shape: Sequence[int]) -> jax.Array | None:
        """Makes the bias, in a layer that has one."""
        if not self.use_bias:
            return None
        return self.param("bias", self.bias_init, shape, self.param_dtype)

    @flax_nn.nowrap
    def _product(
        self,
        operation: Callable[..., jax.Array],
        inputs: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None,
        **options: Any,
    ) -> Product:
        """Promotes the operands of a call; see `Product`."""
        layer: Any = self
        promote = functools.partial(layer.promote_dtype, dtype=layer.dtype)
        promoted = matmul_calls.promoted(layer, promote, inputs, kernel, bias)
        return Product(self, promoted, bias, operation, **options)


class Dense(Matmul, flax_nn.Dense):
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

    _hook: ClassVar[str] = "dot_general"

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies inputs (..., in) by the kernel, and adds the bias: (..., features)."""
        kernel = self._kernel((jnp.shape(inputs)[-1], self.features))
        bias = self._bias((self.features,))
        product = self._product(lax.dot_general, inputs, kernel, bias)
        return matmul_calls.linear(product, precision=self.precision)


class DenseGeneral(Matmul, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.DenseGeneral((2, 3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    _hook: ClassVar[str] = "dot_general"

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Contracts axes of inputs with the kernel, and adds the bias: (..., features...)."""
        features, axis, batch_dims = (
            tuple(np.atleast_1d(np.asarray(given, int)).tolist())
            for given in (self.features, self.axis, self.batch_dims)
        )
        if set(batch_dims) != set(range(len(batch_dims))):
            raise ValueError(
                f"batch_dims {batch_dims} must be consecutive leading dimensions starting from 0."
            )
        batch = tuple(inputs.shape[i] for i in batch_dims)
        contracted = tuple(inputs.shape[i] for i in sorted(i % inputs.ndim for i in axis))
        n, size = math.prod(batch), math.prod(features)
        kernel = self.param(
            "kernel",
            _flattened(self._half_safe(self.kernel_init), (n * math.prod(contracted), size)),
            (*batch, *contracted, *features),
            self.param_dtype,
        )
        bias = None
        if self.use_bias:
            init = _flattened(self._half_safe(self.bias_init), (n * size,))
            bias = self.param("bias", init, (*batch, *features), self.param_dtype)
        product = self._product(lax.dot_general, inputs, kernel, bias)
        return matmul_calls.linear_general(product, axis, batch_dims, precision=self.precision)


def _flattened(init: Callable[..., Any], flat: tuple[int, ...]) -> Callable[..., Any]:
    """Returns an initializer that runs `init` for the shape `flat`, as Flax does."""

    def run(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        made = init(key, flat, dtype)
        if isinstance(made, meta.AxisMetadata):
            return meta.replace_boxed(made, jnp.reshape(made.unbox(), shape))
        return jnp.reshape(made, shape)

    return run


class Einsum(Matmul, flax_nn.Einsum):
    """`flax.linen.Einsum` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.Einsum((4, 3), "bi,ij->bj", dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    _hook: ClassVar[str] = "dot_general"

    @flax_nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Contracts inputs with the kernel, as the equation says, and adds the bias.

        The equation is given here or to the layer.
        """
        equation = flax_nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation:
            raise ValueError('`einsum_str` equation must be explicit and include "->".')
        if equation.count(",") != 1:
            raise ValueError(
                "`einsum_str` equation must have exactly two operands and therefore, exactly one "
                f"comma character, instead of {equation.count(',')}"
            )
        kernel, bias, added = self._kernel(self.shape), None, None
        if self.use_bias:
            shape, added = self._get_bias_shape(equation, inputs, kernel)
            bias = self._bias(shape)
        product = self._product(jnp.einsum, inputs, kernel, bias)
        return product.finish(product.multiply(before=(equation,), precision=self.precision), added)


class Conv(Matmul, flax_nn.Conv):
    """`flax.linen.Conv` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result. A Conv that is a boundary with a wider output_dtype returns the
    convolution's accumulator.

    Example:
      >>> layer = linen.Conv(8, (3, 3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 6, 2)))
      >>> y.shape, y.dtype, variables["params"]["kernel"].dtype
      ((1, 6, 6, 8), dtype(bfloat16), dtype('float32'))
    """

    _hook: ClassVar[str] = "conv_general_dilated"

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in), and adds the bias."""
        groups = self.feature_group_count
        assert inputs.shape[-1] % groups == 0
        size = matmul_calls.kernel_size_of(self)
        kernel = self._kernel((*size, inputs.shape[-1] // groups, self.features))
        product_of = functools.partial(
            self._product,
            lax.conv_general_dilated,
            kernel=kernel,
            bias=self._bias((self.features,)),
        )
        return matmul_calls.convolve(self, inputs, product_of, feature_group_count=groups)


class ConvLocal(Matmul, flax_nn.ConvLocal):
    """`flax.linen.ConvLocal` that obeys policies; dtypes as in `Conv`.

    JAX's operation has no accumulator to return: one that is a boundary with a wider output_dtype
    widens its result.

    Example:
      >>> layer = linen.ConvLocal(8, (3,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 6, 8), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) with a kernel of each place's own, and adds
        a bias of each place's own.
        """
        if self.feature_group_count != 1:
            raise NotImplementedError(
                "`lax.conv_general_dilated_local` does not support `feature_group_count != 1`, "
                f"got `{self.feature_group_count}`."
            )
        size, features = matmul_calls.kernel_size_of(self), inputs.shape[-1]

        def convolved(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
            flat, _ = matmul_calls.one_batch_axis(inputs, len(size))
            padded, windows, options = matmul_calls.windows_of(self, flat)
            return lax.conv_general_dilated(padded, kernel, *windows, **options)

        shared = jax.ShapeDtypeStruct((*size, features, self.features), inputs.dtype)
        places = jax.eval_shape(convolved, inputs, shared).shape[1:-1]
        product_of = functools.partial(
            self._product,
            lax.conv_general_dilated_local,
            kernel=self._kernel((*places, math.prod(size) * features, self.features)),
            bias=self._bias((*places, self.features)),
            accumulates=False,
        )
        return matmul_calls.convolve(self, inputs, product_of, filter_shape=size)


class ConvTranspose(Matmul, flax_nn.ConvTranspose):
    """`flax.linen.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Example:
      >>> layer = linen.ConvTranspose(8, (3,), strides=(2,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) as a convolution's transpose, and adds the
        bias.
        """
        size, channels = matmul_calls.kernel_size_of(self), (inputs.shape[-1], self.features)
        product_of = functools.partial(
            self._product,
            lax.conv_transpose,
            kernel=self._kernel((*size, *(channels[::-1] if self.transpose_kernel else channels))),
            bias=self._bias((self.features,)),
        )
        return matmul_calls.convolve_transposed(self, inputs, product_of)


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

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Looks up integers of any shape: (..., features)."""
        table: Any = self.embedding
        if not matmul_calls.promotes_as_flax(self):
            (table,) = self.promote_dtype(table, dtype=self.dtype, inexact=False)
        return matmul_calls.embedded(self, table, inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """Returns the inner products of a query (..., features) with each embedding: (...,
        num_embeddings).
        """
        promote = functools.partial(self.promote_dtype, dtype=self.dtype)
        promoted = matmul_calls.promoted(self, promote, query, self.embedding, None)
        product = Product(self, promoted, None, matmul_calls.inner_products)
        return product.multiply()

    def attend_cross_entropy(
        self, query: jax.Array, labels: jax.Array, **options: Any
    ) -> jax.Array:
        """Returns the softmax cross-entropy of `attend`'s logits, a chunk of them at a time.

        Args:
          query: (..., features).
          labels: (...) integers: rows of the table.
          **options: of `policy.losses.linear_softmax_cross_entropy`, which computes it, but for
            `axis`.
        """
        promoted = functools.partial(self.promote_dtype, dtype=self.dtype)
        return matmul_calls.attended_loss(self, promoted, query, self.embedding, labels, options)
