"""LoRA and LoRALinear: every matmul in compute_dtype, and the sum with the layer beneath in one
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mpmodules.calls.boundary import LayerCall
from mpmodules.layers.matmul_calls import Numerics, Product, linear
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._layers.linear import Matmul
from mpmodules.nnx._resolution import as_instance_of, viewed
from policy.core.arrays import cast_array
from policy.core.policy import Policy
from policy.core.precedence import with_explicit_dtypes
from policy.core.scope import Source, current_scope


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

    def _call_layer(self, call: LayerCall) -> Any:
        if self._within is None:
            return super()._call_layer(call)
        return call.run(viewed(self, _numerics=self._within))

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Multiplies inputs (..., in) by both matrices, and adds the result of the base module."""
        stored = x, self.lora_a[...], self.lora_b[...]
        x, lora_a, lora_b = self.promote_dtype(stored, dtype=self.dtype)
        numerics = self._numerics if self.promote_dtype is promote_dtype else Numerics()
        product = Product(self, (x @ lora_a, lora_b, None), None, jnp.matmul, numerics=numerics)
        y = product.multiply()
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
        y = linear(product, precision=self.precision, out_sharding=out_sharding)
        returned = self._numerics.result_dtype
        if returned is None:
            return y + self.lora(x)
        lora = self.lora
        if isinstance(lora, LoRA):
            lora = viewed(lora, _within=self._numerics)
        return cast_array(y, returned) + cast_array(lora(x), returned)
