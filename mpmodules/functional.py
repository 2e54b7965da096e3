"""Pure maths that both wings share: arrays and dtypes in, arrays out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

Array = jax.Array


def is_half(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a floating dtype narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def is_wider(dtype: DTypeLike, than: DTypeLike) -> bool:
    return jnp.dtype(dtype).itemsize > jnp.dtype(than).itemsize


def complex_input(arguments: Sequence[Any]) -> np.dtype | None:
    """The widest complex dtype among the arguments that are arrays, or None."""
    dtypes = [x.dtype for x in arguments if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def widen(x: Any, dtype: DTypeLike) -> Any:
    """`x` in the wider of its own dtype and `dtype` where it is a floating array; else `x` itself."""
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating) or not is_wider(dtype, x.dtype):
        return x
    return jnp.asarray(x, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Initial values
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HalfSafe:
    """An initialiser that also works in half precision: where JAX can't run it there, in float32 and cast.

    The orthogonal initialisers are such: no QR decomposition takes half. An initialiser that runs in half is left to.
    """

    init: Callable[..., Array]

    def __call__(self, key: Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32, **kwargs: Any) -> Array:
        if not is_half(dtype) or _runs_in(self.init, tuple(shape), jnp.dtype(dtype)):
            return self.init(key, shape, dtype, **kwargs)
        made = self.init(key, shape, jnp.float32, **kwargs)
        return jax.tree.map(lambda x: x.astype(dtype), made)  # an array, or one in a box of metadata


@functools.lru_cache(maxsize=256)
def _runs_in(init: Callable[..., Array], shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether JAX can lower an initialiser for a dtype. Releases differ in whether they refuse it sooner."""
    try:
        jax.jit(lambda key: init(key, shape, dtype)).lower(jax.eval_shape(lambda: jax.random.key(0)))
    except (NotImplementedError, TypeError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Matmuls that return their accumulator
# ---------------------------------------------------------------------------------------------------------------------


def accumulating(bilinear: Callable[..., Array], accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """A bilinear operation that returns its accumulator, with both backward operations in the operands' dtype.

    `bilinear(lhs, rhs, preferred_element_type=...)` is called forward with `accumulator_dtype`. With that alone, JAX
    would run both backward operations as float32 times half, or refuse (convolutions); here the tangent runs in the
    operands' dtype and is widened, so that the transpose rounds the cotangent first. Both modes of derivative work.
    """
    dtype = jnp.dtype(accumulator_dtype)

    @jax.custom_jvp
    def run(lhs: Array, rhs: Array) -> Array:
        return bilinear(lhs, rhs, preferred_element_type=dtype)

    @run.defjvp
    def run_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        lhs, rhs = primals
        tangent = bilinear(tangents[0], rhs) + bilinear(lhs, tangents[1])
        return run(lhs, rhs), tangent.astype(dtype)

    return run


def accumulating_dot_general(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """A stand-in for `lax.dot_general` that returns its accumulator; see `accumulating`."""
    return _AccumulatingOp(lax.dot_general, jnp.dtype(accumulator_dtype))


def accumulating_conv(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """A stand-in for `lax.conv_general_dilated` that returns its accumulator; see `accumulating`."""
    return _AccumulatingOp(lax.conv_general_dilated, jnp.dtype(accumulator_dtype))


def accumulating_einsum(accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """A stand-in for `jnp.einsum` of two operands that returns its accumulator; see `accumulating`."""
    return _AccumulatingEinsum(jnp.einsum, jnp.dtype(accumulator_dtype))


class _AccumulatingOp:
    """A value, so that a layer that holds one is equal to, and hashes as, another that holds its like."""

    def __init__(self, operation: Callable[..., Array], dtype: np.dtype):
        self._key = (operation, dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AccumulatingOp) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, lhs: Array, rhs: Array, *args: Any, preferred_element_type: Any = None, **kwargs: Any) -> Array:
        operation, dtype = self._key

        def bilinear(lhs: Array, rhs: Array, **preferred: Any) -> Array:
            return operation(lhs, rhs, *args, **kwargs, **preferred)

        return accumulating(bilinear, dtype)(lhs, rhs)


class _AccumulatingEinsum(_AccumulatingOp):
    def __call__(self, subscripts: Any, lhs: Array, rhs: Array, **kwargs: Any) -> Array:  # type: ignore[override]
        operation, dtype = self._key
        kwargs.pop("preferred_element_type", None)
        return accumulating(functools.partial(operation, subscripts, **kwargs), dtype)(lhs, rhs)


def with_bias_gradient(y: Array, bias: Array, shape: Sequence[int], reduction_dtype: DTypeLike) -> Array:
    """`y` itself, which has a bias in it already, with the gradient of that bias.

    Where a bias is cast to half and then broadcast, JAX sums its gradient to half. Here the sum is in
    `reduction_dtype`, and is rounded once, to the bias's dtype; the forward program stays as it is.

    Args:
      y: floating, any shape. What was added to it is to be behind a `stop_gradient`.
      bias: as it is stored.
      shape: of the bias, with as many axes as `y`.
    """

    @jax.custom_jvp
    def run(y: Array, bias: Array) -> Array:
        return y

    def run_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
        y, (tangent, bias_tangent) = primals[0], tangents
        if isinstance(bias_tangent, SymbolicZero):  # a frozen bias costs nothing
            return y, tangent
        wide = jnp.broadcast_to(widen(bias_tangent, reduction_dtype).reshape(shape), y.shape)
        through = wide.astype(y.dtype)  # broadcast before the cast: transposed, cast before the sum
        return y, through if isinstance(tangent, SymbolicZero) else tangent + through

    run.defjvp(run_jvp, symbolic_zeros=True)
    return run(y, bias)


def trailing(y: Array, bias: Array) -> tuple[int, ...]:
    """The shape in which a bias over the last axes of `y` is added."""
    return (1,) * (y.ndim - bias.ndim) + bias.shape


# ---------------------------------------------------------------------------------------------------------------------
# Normalisation
# ---------------------------------------------------------------------------------------------------------------------


def shifted(x: Array, axes: int | Sequence[int]) -> Array:
    """`x` minus its first element along `axes`, through which no gradient flows.

    A normalisation over `axes` is the same for `x` and `shifted(x, axes)`, forward and backward, but the one-pass
    variance E[x^2] - E[x]^2 of the shifted data does not cancel where the mean is large against the spread (measured
    at mean 1000 and spread 1, float32: 3e-5 against 0.42 unshifted and 7e-5 in two passes).

    Args:
      x: floating, any shape.
      axes: the axes that the statistics run over.
    """
    axes = tuple(np.atleast_1d(np.asarray(axes, dtype=int)) % max(x.ndim, 1))
    if any(x.shape[axis] == 0 for axis in axes):
        return x
    first = x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))]
    return x - lax.stop_gradient(first)


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def check_attention_shapes(query: Array, key: Array, value: Array) -> None:
    """Refuses queries, keys and values whose ranks, batch axes or lengths do not fit."""
    arrays = (query, key, value)
    if len({x.ndim for x in arrays}) != 1:
        raise ValueError(f"q, k, v must have same rank, but got {', '.join(str(x.ndim) for x in arrays)}.")
    if len({x.shape[:-3] for x in arrays}) != 1:
        raise ValueError(f"q, k, v batch dims must match, but got shapes {', '.join(str(x.shape) for x in arrays)}.")
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"k, v lengths must match, but got {key.shape[-3]} and {value.shape[-3]}.")


def dot_product_attention_weights(
    query: Array,
    key: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    precision: Any = None,
    einsum: Callable[..., Array] | None = None,
    reduction_dtype: DTypeLike = jnp.float32,
) -> Array:
    """softmax(q k^T / sqrt(H) + bias) over the keys, in `reduction_dtype` from the matmul's accumulator on.

    Axes: B batch (any number), T query, S key, N query heads, K key heads (a divisor of N), H head width. This is
    `jax.nn.dot_product_attention`'s contract: logits and softmax are never rounded to the operands' dtype.

    Args:
      query: (B..., T, N, H), half or full precision.
      key: (B..., S, K, H), the same dtype.
      bias: added to the logits; broadcastable to (B..., N, T, S).
      mask: False (or 0) masks a pair out; broadcastable to (B..., N, T, S). A row without any key left is uniform.
      is_causal: masks out the keys after each query.
      precision: as in `jax.lax`.
      einsum: computes the logits instead of ours, `einsum(subscripts, query, key)`.
      reduction_dtype: what logits and softmax are in; at least float32.

    Returns:
      (B..., N, T, S) in `reduction_dtype`.
    """
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"q, k depths must match, but got {query.shape[-1]} and {key.shape[-1]}.")
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads % key_heads:
        raise ValueError(f"Query heads ({heads}) must be a multiple of key heads ({key_heads}) for grouped queries.")
    if einsum is not None:
        logits = einsum("...qhd,...khd->...hqk", query, key).astype(reduction_dtype)
    else:
        grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, query.shape[-1])  # (B..., T, K, G, H)
        logits = _dot("...qhgd,...khd->...hgqk", grouped, key, precision, reduction_dtype)
        logits = logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])  # (B..., N, T, S)
    logits = logits * np.asarray(1 / math.sqrt(query.shape[-1]), logits.dtype)
    if bias is not None:
        logits = logits + jnp.asarray(bias, logits.dtype)
    allowed = None if mask is None else jnp.asarray(mask).astype(bool)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        causal = causal.reshape((1,) * (logits.ndim - 2) + causal.shape)
        allowed = causal if allowed is None else jnp.logical_and(jnp.broadcast_to(allowed, logits.shape), causal)
    if allowed is not None:
        allowed = jnp.broadcast_to(allowed, logits.shape)
        # Half of the lowest number: a bias on top of it can't reach -inf, and a row of it is uniform, not NaN.
        logits = jnp.where(allowed, logits, np.asarray(0.5 * float(jnp.finfo(logits.dtype).min), logits.dtype))
    return jax.nn.softmax(logits, axis=-1)


def weighted_values(weights: Array, value: Array, *, precision: Any = None) -> Array:
    """Sums the values by attention weight.

    Args:
      weights: (B..., N, T, S), the values' dtype.
      value: (B..., S, K, H), K a divisor of N.

    Returns:
      (B..., T, N, H) in the values' dtype.
    """
    heads, value_heads = weights.shape[-3], value.shape[-2]
    if heads % value_heads:
        raise ValueError(f"Query heads ({heads}) must be a multiple of value heads ({value_heads}).")
    grouped = weights.reshape(*weights.shape[:-3], value_heads, heads // value_heads, *weights.shape[-2:])
    out = jnp.einsum("...hgqk,...khd->...qhgd", grouped, value, precision=precision)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def _dot(subscripts: str, lhs: Array, rhs: Array, precision: Any, dtype: DTypeLike) -> Array:
    """An einsum of two operands that returns its accumulator where `dtype` is wider than the operands."""
    einsum = functools.partial(jnp.einsum, subscripts, precision=precision)
    if not is_wider(dtype, lhs.dtype):
        return einsum(lhs, rhs)
    return accumulating(einsum, dtype)(lhs, rhs)


def attention_dropout(weights: Array, rate: float, *, broadcast: bool, batch_axes: int, rng: Array | None) -> Array:
    """Drops attention weights with probability `rate` and scales the rest by 1 / (1 - rate), as Flax does.

    Args:
      weights: (B..., N, T, S).
      rate: in [0, 1).
      broadcast: whether all batch entries and heads share one mask.
      batch_axes: how many batch axes there are.
      rng: the key; the mask is the one that Flax draws from it.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {rate!r}.")
    if rng is None:
        raise ValueError("dropout_rng is required when dropout_rate > 0 and deterministic=False.")
    shape = (1,) * (batch_axes + 1) + weights.shape[-2:] if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    scale = np.asarray(1.0 - rate, weights.dtype)
    return weights * (keep.astype(weights.dtype) / scale)
