"""Matmuls, convolutions and embeddings in compute_dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.module import first_from
from jax import lax

from mpmodules.calls.boundary import MethodCall, Numerics
from mpmodules.layers import matmul_calls
from mpmodules.layers.matmul_calls import Product
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._quantized import as_stored
from mpmodules.nnx._resolution import as_instance_of, viewed
from policy.core.arrays import cast_array
from policy.core.policy import Policy
from policy.core.precedence import with_explicit_dtypes
from policy.core.scope import Source, current_scope


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    The gradient of a half bias is summed in reduction_dtype.
    """

    def _product(self, operation: Callable[..., jax.Array], inputs: jax.Array) -> Product:
        """Promotes the operands of a call; see `Product`."""
        layer: Any = self
        kernel, bias = as_stored(layer.kernel), None if layer.bias is None else layer.bias[...]
        promoted = matmul_calls.promoted(layer, _promoting(layer), inputs, kernel, bias)
        return Product(self, promoted, bias, operation)


def _promoting(layer: Any) -> Callable[..., Any]:
    """Returns a layer's `promote_dtype` as a function of the operands."""
    return lambda *operands: layer.promote_dtype(operands, dtype=layer.dtype)


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

    _hook = "dot_general"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies inputs (..., in) by the kernel, and adds the bias: (..., out)."""
        product = self._product(lax.dot_general, inputs)
        return matmul_calls.linear(product, precision=self.precision, out_sharding=out_sharding)


class LinearGeneral(Matmul, flax_nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    _hook = "dot_general"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts axes of inputs with the kernel, and adds the bias: (..., out...)."""
        product = self._product(lax.dot_general, inputs)
        options = {"precision": self.precision, "out_sharding": out_sharding}
        return matmul_calls.linear_general(product, self.axis, tuple(self.batch_axis), **options)


class Einsum(Matmul, flax_nnx.Einsum):
    """`flax.nnx.Einsum` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.Einsum("bi,ij->bj", (4, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    _hook = "einsum_op"

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Contracts inputs with the kernel, as the equation says, and adds the bias.

        Args:
          inputs: the first operand of the equation.
          einsum_str: an equation of two operands; by default the layer's own.
          out_sharding: the sharding of the product; None leaves it to JAX.

        Raises:
          ValueError: neither the call nor the layer has an equation.
        """
        text = "No `einsum_str` argument was provided to Einsum as either a __call__ argument, or "
        equation = first_from(einsum_str, self.einsum_str, error_msg=f"{text}class attribute.")
        equation = equation.replace(" ", "")
        self._einsum_str_check(equation)
        product = self._product(jnp.einsum, inputs)
        options = {"precision": self.precision, "out_sharding": out_sharding}
        y = product.multiply(before=(equation,), **options)
        if product.bias is None:
            return product.finish(y)
        operands = product.inputs, product.kernel
        return product.finish(y, self._infer_broadcasted_bias_shape(equation, *operands))


class Conv(Matmul, flax_nnx.Conv):
    """`flax.nnx.Conv` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result.

    Example:
      >>> layer = nnx.Conv(2, 8, (3, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((1, 6, 6, 2)))
      >>> y.shape, y.dtype, layer.kernel[...].dtype
      ((1, 6, 6, 8), dtype(bfloat16), dtype('float32'))
    """

    _hook = "conv_general_dilated"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in), and adds the bias."""
        assert self.in_features % self.feature_group_count == 0
        product_of = functools.partial(self._product, lax.conv_general_dilated)
        options = {"feature_group_count": self.feature_group_count, "out_sharding": out_sharding}
        return matmul_calls.convolve(self, inputs, product_of, **options)


class ConvTranspose(Matmul, flax_nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Example:
      >>> layer = nnx.ConvTranspose(2, 8, (3,), 2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) as a convolution's transpose, and adds the
        bias.
        """
        product_of = functools.partial(self._product, lax.conv_transpose)
        return matmul_calls.convolve_transposed(self, inputs, product_of)


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

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Looks up integers of any shape: (..., features)."""
        table = as_stored(self.embedding)
        if not matmul_calls.promotes_as_flax(self):
            (table,) = self.promote_dtype((table,), dtype=self.dtype, inexact=False)
        return matmul_calls.embedded(self, table, inputs, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the inner products of a query (..., features) with each embedding: (...,
        num_embeddings).
        """
        table = as_stored(self.embedding)
        promoted = matmul_calls.promoted(self, _promoting(self), query, table, None)
        product = Product(self, promoted, None, matmul_calls.inner_products)
        return product.multiply(out_sharding=out_sharding)

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
        table = self.embedding[...]
        return matmul_calls.attended_loss(self, _promoting(self), query, table, labels, options)


class LoRA(Layer, flax_nnx.LoRA):
    """`flax.nnx.LoRA` that obeys policies.

    Both matrices are kept in param_dtype and multiplied in compute_dtype; a `base_module`'s result
    is cast to compute_dtype before it is added.

    Example:
      >>> layer = nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype, layer.lora_a[...].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    _within: Numerics | None = None  # of the layer that adds the result to its own

    def _call_layer(self, call: MethodCall) -> Any:
        if self._within is None:
            return super()._call_layer(call)
        return call.run(viewed(self, _numerics=self._within))

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Multiplies inputs (..., in) by both matrices, and adds the result of the base module."""
        stored = x, self.lora_a[...], self.lora_b[...]
        x, lora_a, lora_b = self.promote_dtype(stored, dtype=self.dtype)
        y = Product(self, (x @ lora_a, lora_b, None), None, jnp.matmul).multiply()
        if self.base_module is None:
            return y
        if not callable(self.base_module):
            raise ValueError("`self.base_module` must be callable.")
        base = self.base_module(x, **kwargs)
        return y + (base if self._numerics.result_dtype is None else cast_array(base, y.dtype))


class LoRALinear(Matmul, flax_nnx.LoRALinear):
    """`flax.nnx.LoRALinear` that obeys policies; dtypes as in `Linear` and `LoRA`.

    Under a policy its low-rank part follows the policy too, unless `lora_dtype` or
    `lora_param_dtype` is given.

    Example:
      >>> layer = nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype, layer.kernel[...].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    _hook = "dot_general"

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super()._construct(policy, source, upstream_init, args, kwargs)
        if type(self.lora) is flax_nnx.LoRA:
            dtype, param_dtype = kwargs.get("lora_dtype"), kwargs.get("lora_param_dtype")
            low_rank = with_explicit_dtypes(
                policy,
                source=source.for_those_inside(type(self).__name__),
                dtype=dtype,
                param_dtype=param_dtype,
                what="LoRA",
                where="lora",
            )
            self.lora = as_instance_of(LoRA, self.lora)
            self.lora._capture(low_rank.policy, low_rank.source)

    def _policy_arguments(
        self, upstream_init: Callable[..., None], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        if current_scope().policy is None:
            return kwargs
        names = ("dtype", "param_dtype")
        of_lora = {f"lora_{name}": kwargs[name] for name in names if name in kwargs}
        return of_lora | {name: value for name, value in kwargs.items() if value is not None}

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies inputs (..., in) by the kernel, and adds the bias and the low-rank part."""
        product = self._product(lax.dot_general, x)
        y = matmul_calls.linear(product, precision=self.precision, out_sharding=out_sharding)
        returned = self._numerics.result_dtype
        if returned is None:
            return y + self.lora(x)
        lora = self.lora
        if isinstance(lora, LoRA):
            lora = viewed(lora, _within=self._numerics)
        return cast_array(y, returned) + cast_array(lora(x), returned)
