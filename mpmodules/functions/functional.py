"""Pure maths that both APIs share: arrays and dtypes in, arrays out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from policy.functions.cast_like import cast_like
from policy.functions.checkpointing import cached_inline_jit, materialized
from policy.programs.dtypes import is_half as is_half

Array = jax.Array


@functools.cache
def is_wider(dtype: DTypeLike, than: DTypeLike) -> bool:
    """Returns whether `dtype` has more bytes than `than`.

    Example:
      >>> functional.is_wider(jnp.float32, jnp.bfloat16)
      True
    """
    return jnp.dtype(dtype).itemsize > jnp.dtype(than).itemsize


def complex_input(arguments: Sequence[Any]) -> np.dtype | None:
    """Returns the widest complex dtype among the arguments that are arrays, or None.

    Example:
      >>> functional.complex_input([jnp.ones(2), jnp.ones(2, jnp.complex64)])
      dtype('complex64')
    """
    dtypes = [
        x.dtype
        for x in arguments
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)
    ]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def widen(x: Any, dtype: DTypeLike) -> Any:
    """Casts a floating array to `dtype` where that is wider than its own.

    Returns anything else as it is.

    Example:
      >>> functional.widen(jnp.ones(2, jnp.bfloat16), jnp.float32).dtype
      dtype('float32')
    """
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating) or not is_wider(dtype, x.dtype):
        return x
    return jnp.asarray(x, dtype)


def mixing_allowed(allowed: bool = True) -> contextlib.AbstractContextManager[object]:
    """Puts JAX's standard promotion in force for a block, in which Flax's code mixes dtypes. With
    `allowed=False` leaves promotion as it is.

    Example:
      >>> with jax.numpy_dtype_promotion("strict"), functional.mixing_allowed():
      ...     total = jnp.ones(2, jnp.bfloat16) + jnp.ones(2)
      >>> total.dtype
      dtype('float32')
    """
    return jax.numpy_dtype_promotion("standard") if allowed else contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------
# Initial values
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HalfSafe:
    """An initializer that also works in half precision: one that JAX can't run there is run in
    float32 and cast.

    The orthogonal initializers are such: no QR decomposition takes half. One that runs in half is
    run in half.

    Example:
      >>> init = functional.HalfSafe(jax.nn.initializers.orthogonal())
      >>> init(jax.random.key(0), (2, 2), jnp.bfloat16).dtype
      dtype(bfloat16)
    """

    init: Callable[..., Array]

    def __call__(
        self, key: Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32, **kwargs: Any
    ) -> Array:
        if not is_half(dtype) or _runs_in(self.init, tuple(shape), jnp.dtype(dtype)):
            return self.init(key, shape, dtype, **kwargs)
        made = self.init(key, shape, jnp.float32, **kwargs)
        if hasattr(made, "raw_value"):  # in `VariableMetadata` of nnx, which is no pytree
            return dataclasses.replace(made, raw_value=made.raw_value.astype(dtype))  # type: ignore[arg-type]
        # An array, or one in a box of metadata of linen.
        return jax.tree.map(lambda x: x.astype(dtype), made)


@functools.lru_cache(maxsize=256)
def _runs_in(init: Callable[..., Array], shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Returns whether JAX can lower an initializer for a dtype.

    Some releases reject it while tracing.
    """
    try:
        made = lambda key: init(key, shape, dtype)  # noqa: E731
        key = jax.eval_shape(lambda: jax.random.key(0))
        jax.jit(lambda key: getattr(x := made(key), "raw_value", x)).lower(key)
    except (NotImplementedError, TypeError):
        return False
    return True


def half_safe_inits(
    inits: Mapping[str, Callable[..., Any] | None], param_dtype: DTypeLike
) -> dict[str, HalfSafe]:
    """Returns initializers, by name, that also work in half precision.

    There are none where parameters are not half.

    Args:
      inits: the initializers of a layer, by argument or field; entries that can't be called are
        left out.
      param_dtype: the dtype of the layer's parameters.

    Example:
      >>> inits = {"kernel_init": jax.nn.initializers.orthogonal(), "bias_init": None}
      >>> list(functional.half_safe_inits(inits, jnp.bfloat16))
      ['kernel_init']
    """
    if not is_half(param_dtype):
        return {}
    return {
        name: init if isinstance(init, HalfSafe) else HalfSafe(init)
        for name, init in inits.items()
        if callable(init)
    }


# --------------------------------------------------------------------------------------------------
# Biases
# --------------------------------------------------------------------------------------------------


def add_bias(
    y: Array,
    bias: Array,
    shape: Sequence[int],
    *,
    stored: Array,
    reduction_dtype: DTypeLike = jnp.float32,
) -> Array:
    """Returns ``y + bias``, the bias reshaped.

    Where a bias is cast to half and then broadcast, JAX sums its gradient in half. Here the sum is
    in `reduction_dtype`, and is rounded once, to the dtype in which the bias is stored; the forward
    program is the plain one.

    Args:
      y: floating, any shape.
      bias: as it is added: `stored`, cast.
      shape: of the bias, with as many axes as `y`.
      stored: gets the gradient of a half bias.
      reduction_dtype: in which the gradient of a half bias is summed.

    Example:
      >>> def loss(bias, x):
      ...     y = functional.add_bias(x, bias.astype(x.dtype), (1, 2), stored=bias)
      ...     return y.sum()
      >>> jax.grad(loss)(jnp.zeros(2), jnp.ones((1025, 2), jnp.bfloat16))  # 1024 in bfloat16
      Array([1025., 1025.], dtype=float32)
    """
    if not is_half(bias.dtype):
        return y + jnp.reshape(bias, shape)
    run = cached_inline_jit(_add_bias, tuple(shape), jnp.dtype(reduction_dtype))
    return run(y, bias, stored)


def _plain_sum(
    shape: tuple[int, ...], reduction_dtype: np.dtype, y: Array, bias: Array, stored: Array
) -> Array:
    # Where JAX drops the rule below, as in second derivatives of a scan, `bias` leads to `stored`.
    return y + jnp.reshape(bias, shape)


def _bias_tangent(
    shape: tuple[int, ...],
    reduction_dtype: np.dtype,
    primals: tuple[Array, Array, Array],
    tangents: tuple[Any, Any, Any],
) -> tuple[Array, Any]:
    tangent, _, bias_tangent = tangents
    y = _add_bias(shape, reduction_dtype, *primals)
    if isinstance(bias_tangent, SymbolicZero):  # a frozen bias costs nothing
        return y, tangent
    wide = widen(bias_tangent, reduction_dtype).reshape(shape)
    # Broadcast before the cast: transposed, cast before the sum. The cotangent is in memory for the
    # matmul before it.
    tangent = None if isinstance(tangent, SymbolicZero) else tangent
    like = y if tangent is None else tangent
    through = materialized(cast_like(broadcast_like(wide, y), like))
    return y, through if tangent is None else tangent + through


_add_bias = jax.custom_jvp(_plain_sum, nondiff_argnums=(0, 1))
_add_bias.defjvp(_bias_tangent, symbolic_zeros=True)


def broadcast_like(x: Array, like: Array) -> Array:
    """Broadcasts `x` to the shape of `like`, sharded alike along explicit axes: else the cotangent
    is gathered.

    Example:
      >>> functional.broadcast_like(jnp.ones((1, 3)), jnp.ones((2, 3))).shape
      (2, 3)
    """
    sharding = jax.typeof(like).sharding
    return jnp.broadcast_to(x, like.shape, out_sharding=None if sharding.mesh.empty else sharding)


def trailing(y: Array, bias: Array) -> tuple[int, ...]:
    """Returns the shape in which a bias over the last axes of `y` is added.

    Example:
      >>> functional.trailing(jnp.ones((2, 5, 3)), jnp.ones(3))
      (1, 1, 3)
    """
    return (1,) * (y.ndim - bias.ndim) + bias.shape
