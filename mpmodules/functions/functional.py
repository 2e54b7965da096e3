"""Pure maths that both wings share: arrays and dtypes in, arrays out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from policy.eight_bits import scaled_convolution, scaled_matmul
from policy.eight_bits.scaled_matmul import ScaledMatmul
from policy.functions.accumulators import accumulating, bilinear_tangent
from policy.functions.checkpointing import cached_inline_jit
from policy.functions.materialize import materialized

Array = jax.Array


def is_half(dtype: DTypeLike) -> bool:
    """Returns whether `dtype` is a floating dtype narrower than float32.

    Example:
      >>> functional.is_half(jnp.bfloat16), functional.is_half(jnp.float32)
      (True, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


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


# --------------------------------------------------------------------------------------------------
# Initial values
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HalfSafe:
    """An initialiser that also works in half precision: one that JAX can't run there is run in
    float32 and cast.

    The orthogonal initialisers are such: no QR decomposition takes half. One that runs in half is
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
        return jax.tree.map(
            lambda x: x.astype(dtype), made
        )  # an array, or one in a box of metadata


@functools.lru_cache(maxsize=256)
def _runs_in(init: Callable[..., Array], shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Returns whether JAX can lower an initialiser for a dtype.

    Some releases refuse it while tracing.
    """
    try:
        jax.jit(lambda key: init(key, shape, dtype)).lower(
            jax.eval_shape(lambda: jax.random.key(0))
        )
    except (NotImplementedError, TypeError):
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Matmuls that return their accumulator
# --------------------------------------------------------------------------------------------------


def with_operand_gradients(
    y: Array, lhs: Array, rhs: Array, bilinear: Callable[[Array, Array], Array]
) -> Array:
    """Returns `y`, and gives `lhs` and `rhs` their gradients through `bilinear(lhs, rhs)`.

    For an operation that can return its accumulator, but can't be replaced by `accumulating`: `y`
    is that accumulator, or contains it. The forward program stays as it is, and both backward
    operations run in the operands' dtype.

    Args:
      y: the operation's result, made of operands behind a `stop_gradient`.
      lhs, rhs: the operands, in the dtype that the operation ran in.
      bilinear: the operation, of operands and result in that dtype.

    Example:
      >>> def loss(x, y):
      ...     out = jnp.dot(*jax.lax.stop_gradient((x, y)), preferred_element_type=jnp.float32)
      ...     return functional.with_operand_gradients(out, x, y, jnp.dot)
      >>> jax.grad(loss)(jnp.ones(2, jnp.bfloat16), jnp.full(2, 3, jnp.bfloat16))
      Array([3, 3], dtype=bfloat16)
    """

    @jax.custom_jvp
    def run(y: Array, lhs: Array, rhs: Array) -> Array:
        return y

    def run_jvp(
        primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]
    ) -> tuple[Array, Any]:
        operands = primals[1], primals[2]
        y = run(*primals)  # second derivatives read the operands through it
        through = bilinear_tangent(bilinear, operands, tangents[1:], y)
        return y, through if isinstance(tangents[0], SymbolicZero) else tangents[0] + through

    run.defjvp(run_jvp, symbolic_zeros=True)
    return run(y, lhs, rhs)


def accumulating_dot_general(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `lax.dot_general` that returns its accumulator; see `accumulating`.

    Example:
      >>> dot_general = functional.accumulating_dot_general(jnp.float32)
      >>> x = jnp.ones(2, jnp.bfloat16)
      >>> dot_general(x, x, (((0,), (0,)), ((), ())))
      Array(2., dtype=float32)
    """
    return _AccumulatingOp(lax.dot_general, jnp.dtype(accumulator_dtype))


def accumulating_conv(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `lax.conv_general_dilated` that returns its accumulator.

    See `accumulating`.

    Example:
      >>> conv = functional.accumulating_conv(jnp.float32)
      >>> x, kernel = jnp.ones((1, 1, 4), jnp.bfloat16), jnp.ones((1, 1, 2), jnp.bfloat16)
      >>> conv(x, kernel, (1,), "VALID").dtype
      dtype('float32')
    """
    return _AccumulatingOp(lax.conv_general_dilated, jnp.dtype(accumulator_dtype))


def accumulating_einsum(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `jnp.einsum` of two operands that returns its accumulator.

    See `accumulating`.

    Example:
      >>> einsum = functional.accumulating_einsum(jnp.float32)
      >>> einsum("i,i->", jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))
      Array(2., dtype=float32)
    """
    return _AccumulatingEinsum(jnp.einsum, jnp.dtype(accumulator_dtype))


def scaled_dot_general(by: ScaledMatmul, dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `lax.dot_general` that multiplies in 8 bits and returns `dtype`.

    See `policy.eight_bits.scaled_matmul.scaled_dot_general`. The right operand is the weight.

    Example:
      >>> import policy, warnings
      >>> warnings.simplefilter("ignore", policy.DtypePolicyWarning)  # a CPU emulates 8 bits
      >>> by = policy.ScaledMatmul("int8", "int8")
      >>> dot_general = functional.scaled_dot_general(by, jnp.bfloat16)
      >>> x = jnp.ones(2, jnp.bfloat16)
      >>> dot_general(x, x, (((0,), (0,)), ((), ())))
      Array(2, dtype=bfloat16)
    """
    return _ScaledOp(by, jnp.dtype(dtype))


def scaled_einsum(by: ScaledMatmul, dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `jnp.einsum` of two operands that multiplies in 8 bits.

    See `scaled_dot_general`.

    Example:
      >>> import policy, warnings
      >>> warnings.simplefilter("ignore", policy.DtypePolicyWarning)  # a CPU emulates 8 bits
      >>> einsum = functional.scaled_einsum(policy.ScaledMatmul("int8", "int8"), jnp.bfloat16)
      >>> einsum("i,i->", jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))
      Array(2, dtype=bfloat16)
    """
    return _ScaledEinsum(by, jnp.dtype(dtype))


def scaled_conv(by: ScaledMatmul, dtype: DTypeLike) -> Callable[..., Array]:
    """Makes a stand-in for `lax.conv_general_dilated` that convolves in 8 bits and returns `dtype`.

    See `policy.eight_bits.scaled_convolution.scaled_conv`.

    Example:
      >>> import policy, warnings
      >>> warnings.simplefilter("ignore", policy.DtypePolicyWarning)  # a CPU emulates 8 bits
      >>> conv = functional.scaled_conv(policy.ScaledMatmul("int8", "int8"), jnp.bfloat16)
      >>> x, kernel = jnp.ones((1, 1, 4), jnp.bfloat16), jnp.ones((1, 1, 2), jnp.bfloat16)
      >>> conv(x, kernel, (1,), "VALID")
      Array([[[2, 2, 2]]], dtype=bfloat16)
    """
    return _ScaledConv(by, jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class _ScaledOp:
    """A matmul in 8 bits. Equal ones compare equal, and so do layers that hold them."""

    by: ScaledMatmul
    dtype: np.dtype

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: scaled_matmul.DimensionNumbers,
        *_: Any,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        **options: Any,
    ) -> Array:
        return scaled_matmul.scaled_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            self.by,
            dtype=preferred_element_type or self.dtype,
            out_sharding=out_sharding,
        )


class _ScaledEinsum(_ScaledOp):
    def __call__(  # type: ignore[override]
        self,
        subscripts: str,
        lhs: Array,
        rhs: Array,
        *,
        preferred_element_type: DTypeLike | None = None,
        **options: Any,
    ) -> Array:
        dtype = preferred_element_type or self.dtype
        # The axes of an einsum's result stand in another order than its matmul's.
        is_placed = options.get("out_sharding") is not None
        product = (
            None
            if is_placed
            else scaled_matmul.scaled_einsum(subscripts, lhs, rhs, self.by, dtype=dtype)
        )
        if product is None:  # no single matmul
            return accumulating_einsum(dtype)(subscripts, lhs, rhs, **options)
        return product


class _ScaledConv(_ScaledOp):
    def __call__(  # type: ignore[override]
        self,
        lhs: Array,
        rhs: Array,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        *,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        **options: Any,
    ) -> Array:
        dtype = preferred_element_type or self.dtype
        options |= {"window_strides": window_strides, "padding": padding}
        if not scaled_convolution.may_run_in_8_bits(lhs, rhs, batch_group_count, out_sharding):
            options |= {"batch_group_count": batch_group_count, "out_sharding": out_sharding}
            return accumulating_conv(dtype)(lhs, rhs, **options, precision=precision)
        return scaled_convolution.scaled_conv(lhs, rhs, self.by, **options).astype(dtype)


class _AccumulatingOp:
    """An operation that returns its accumulator.

    Equal operations compare equal, and so do layers that hold them.
    """

    def __init__(self, operation: Callable[..., Array], dtype: np.dtype):
        self._key = (operation, dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AccumulatingOp) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(
        self, lhs: Array, rhs: Array, *args: Any, preferred_element_type: Any = None, **kwargs: Any
    ) -> Array:
        operation, dtype = self._key

        def bilinear(lhs: Array, rhs: Array, **preferred: Any) -> Array:
            return operation(lhs, rhs, *args, **kwargs, **preferred)

        return accumulating(bilinear, dtype)(lhs, rhs)


class _AccumulatingEinsum(_AccumulatingOp):
    def __call__(self, subscripts: Any, lhs: Array, rhs: Array, **kwargs: Any) -> Array:  # type: ignore[override]
        operation, dtype = self._key
        kwargs.pop("preferred_element_type", None)
        return accumulating(functools.partial(operation, subscripts, **kwargs), dtype)(lhs, rhs)


def with_bias_gradient(
    y: Array, bias: Array, shape: Sequence[int], reduction_dtype: DTypeLike
) -> Array:
    """Returns `y`, which contains the bias already, and gives the bias its gradient.

    Where a bias is cast to half and then broadcast, JAX sums its gradient to half. Here the sum is
    in `reduction_dtype`, and is rounded once, to the bias's dtype; the forward program stays as it
    is.

    Args:
      y: floating, any shape; the bias was added to it behind a `stop_gradient`.
      bias: as it is stored.
      shape: of the bias, with as many axes as `y`.

    Example:
      >>> def loss(bias, x):
      ...     y = x + jax.lax.stop_gradient(bias).reshape(1, 2)
      ...     return functional.with_bias_gradient(y, bias, (1, 2), jnp.float32).sum()
      >>> jax.grad(loss)(jnp.zeros(2, jnp.bfloat16), jnp.ones((3, 2), jnp.bfloat16))
      Array([3, 3], dtype=bfloat16)
    """
    return cached_inline_jit(_with_bias_gradient, tuple(shape), jnp.dtype(reduction_dtype))(y, bias)


def _identity(shape: tuple[int, ...], reduction_dtype: np.dtype, y: Array, bias: Array) -> Array:
    return y


def _bias_tangent(
    shape: tuple[int, ...],
    reduction_dtype: np.dtype,
    primals: tuple[Array, Array],
    tangents: tuple[Any, Any],
) -> tuple[Array, Any]:
    tangent, bias_tangent = tangents
    y = _with_bias_gradient(shape, reduction_dtype, *primals)  # for second derivatives
    if isinstance(bias_tangent, SymbolicZero):  # a frozen bias costs nothing
        return y, tangent
    wide = widen(bias_tangent, reduction_dtype).reshape(shape)
    # Broadcast before the cast: transposed, cast before the sum. The cotangent is in memory for the
    # matmul before it.
    through = materialized(broadcast_like(wide, y).astype(y.dtype))
    return y, through if isinstance(tangent, SymbolicZero) else tangent + through


_with_bias_gradient = jax.custom_jvp(_identity, nondiff_argnums=(0, 1))
_with_bias_gradient.defjvp(_bias_tangent, symbolic_zeros=True)


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
