"""LoRA and LoRALinear: every matmul in compute_dtype, and the sum with the layer beneath in one
dtype.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._layers.linear import Linear, Matmul
from mpmodules.nnx._resolution import as_instance_of, in_complex, viewed
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective, with_explicit_dtypes
from policy.core.scope import Source


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

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy, base = effective.policy, self.base_module
        view = in_complex(self, args, kwargs)
        if policy is None or view is not None:
            return method(view or self, *args, **kwargs)
        view, returned = self, self.dtype
        if crosses and self.dtype == policy.compute_dtype and self.promote_dtype is promote_dtype:
            view, returned = _accumulating(self, policy.output_dtype), policy.output_dtype
        if callable(base):
            view = viewed(
                view,
                base_module=lambda x, **kwargs: cast_array(base(_plain(x), **kwargs), returned),
            )
        return method(view, *args, **kwargs)


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

    _operation = Linear._operation
    _default_operations = Linear._default_operations
    _accumulating = Linear._accumulating
    _scaled = Linear._scaled

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        def init(layer: Any, *args: Any, **kwargs: Any) -> None:
            if policy is not None:
                for name in ("dtype", "param_dtype"):
                    if kwargs.get(f"lora_{name}") is None:
                        kwargs[f"lora_{name}"] = kwargs[name]
            upstream_init(layer, *args, **kwargs)

        # Flax hands these on to Linear without naming them.
        names = ("dtype", "param_dtype")
        own = list(inspect.signature(upstream_init).parameters.values())
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names
        ]
        init.__signature__ = inspect.Signature([*own[:-1], *named, own[-1]])  # type: ignore[attr-defined]
        super()._construct(policy, source, init, args, kwargs)
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

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy

        @functools.wraps(method)
        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if policy is None:
                return method(layer, *args, **kwargs)
            returned = returned_dtype(policy, crosses)
            lora = layer.lora
            if isinstance(lora, LoRA) and lora.promote_dtype is promote_dtype:
                lora = _accumulating(lora, returned)
            return method(viewed(layer, lora=_returning(lora, returned)), *args, **kwargs)

        return super()._call_layer(effective, crosses, run, args, kwargs)


class _Factor:
    """The left operand of Flax's ``x @ lora_a @ lora_b``: the last of these products returns its
    accumulator.
    """

    def __init__(self, x: jax.Array, dtype: DTypeLike, *, is_last: bool = False):
        self.x, self.dtype, self.is_last = x, dtype, is_last

    def __matmul__(self, other: jax.Array) -> Any:
        if self.is_last:
            return functional.accumulating(jnp.matmul, self.dtype)(self.x, other)
        return _Factor(self.x @ other, self.dtype, is_last=True)


def _plain(x: Any) -> Any:
    return x.x if isinstance(x, _Factor) else x


def _accumulating(lora: Any, dtype: DTypeLike) -> Any:
    """Returns a view of a LoRA whose product is its accumulator in `dtype`, where that is wider
    than its operands.
    """

    def promote(
        arrays: tuple[Any, ...], /, *, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> tuple[Any, ...]:
        x, *matrices = promote_dtype(arrays, dtype=dtype, inexact=inexact)
        return (
            (_Factor(x, returned), *matrices)
            if functional.is_wider(returned, x.dtype)
            else (x, *matrices)
        )

    returned = dtype
    return viewed(lora, promote_dtype=promote)


def _returning(function: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """Wraps `function`: its result is cast to `dtype`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return cast_array(function(*args, **kwargs), dtype)

    return run
