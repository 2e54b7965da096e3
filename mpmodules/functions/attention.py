"""Attention's maths, which both APIs share: half-precision matmuls, logits and softmax in
reduction_dtype.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from mpmodules.functions.functional import complex_input, is_wider, mixing_allowed
from policy.core.scope import current_policy
from policy.functions.checkpointing import cached_inline_jit, keeping_inputs_once
from policy.functions.reductions import accumulating

Array = jax.Array


def check_shapes(query: Array, key: Array, value: Array | None = None) -> None:
    """Rejects queries, keys and values whose ranks, batch axes, heads, widths or lengths do not
    fit.

    Args:
      query: (B..., T, N, H); `key`: (B..., S, K, H); `value`: (B..., S, K, any width).

    Example:
      >>> attention.check_shapes(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8)))
    """
    arrays = [x for x in (query, key, value) if x is not None]
    if len({x.ndim for x in arrays}) != 1:
        ranks = ", ".join(str(x.ndim) for x in arrays)
        raise ValueError(f"q, k, v must have same rank, but got {ranks}.")
    if len({x.shape[:-3] for x in arrays}) != 1:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(f"q, k, v batch dims must match, but got shapes {shapes}.")
    if value is not None and key.shape[-3] != value.shape[-3]:
        raise ValueError(f"k, v lengths must match, but got {key.shape[-3]} and {value.shape[-3]}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"q, k depths must match, but got {query.shape[-1]} and {key.shape[-1]}.")
    for name, x in zip(("key", "value"), arrays[1:], strict=False):
        heads = x.shape[-2]
        if not heads or query.shape[-2] % heads:
            raise ValueError(
                f"Query heads ({query.shape[-2]}) must be a multiple of {name} heads ({heads})."
            )


def operand_dtype(dtype: DTypeLike | None, *operands: Array) -> DTypeLike | None:
    """Returns the dtype to cast attention's operands to: `dtype`, or None for complex ones, which
    no policy casts.

    Example:
      >>> attention.operand_dtype(jnp.dtype("bfloat16"), jnp.ones(2))
      dtype(bfloat16)
    """
    return None if current_policy() is not None and complex_input(operands) is not None else dtype


def check_soft_cap(soft_cap: float | None) -> None:
    """Rejects a soft cap that is not positive.

    Example:
      >>> attention.check_soft_cap(50.0)
    """
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap should be a positive number, or None, but got {soft_cap!r}.")


def adding_indices(decoding: bool) -> contextlib.AbstractContextManager[Any]:
    """Allows promotion while Flax decodes in x64 mode, where it adds its int32 counter to int64
    indices.

    Example:
      >>> with attention.adding_indices(decoding=True):
      ...     index = jnp.asarray(0, jnp.int32) + 1
    """
    return mixing_allowed(decoding and jax.config.read("jax_enable_x64"))


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    precision: PrecisionLike = None,
    reduction_dtype: DTypeLike = jnp.float32,
    soft_cap: float | None = None,
    key_scale: Array | None = None,
    value_scale: Array | None = None,
) -> Array:
    """Computes softmax(q k^T / sqrt(H) + bias) v where the weights themselves are not needed.

    The sum of the values is divided by the sum of the exponentials, not each weight; and backward
    takes the sum of weights times their cotangents from the result, as FlashAttention does (Dao et
    al. 2022, section B.2). That leaves two matmuls each way with elementwise operations around
    them, and no pass over all weights more than by hand.

    Args:
      query: (B..., T, N, H), half precision.
      key: (B..., S, K, H), `value`: (B..., S, K, any width); the same dtype.
      bias, mask, is_causal, precision, reduction_dtype, soft_cap, key_scale: as in
        `dot_product_attention_weights`.
      value_scale: (B..., S, K, 1), which the values are multiplied by, by way of their weights;
        None is 1.

    Returns:
      (B..., T, N, width of `value`) in the values' dtype.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> attention.dot_product_attention(x, x, x, is_causal=True).shape
      (2, 5, 4, 8)
    """
    check_shapes(query, key, value)
    options = (precision, is_causal, jnp.dtype(reduction_dtype), soft_cap, key_scale)

    def attend(
        query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None
    ) -> Array:
        logits = _logits(query, key, bias, mask, *options)
        if value_scale is not None:
            return _weighted_codes(precision, logits, value, value_scale)
        if not key.shape[-3]:  # no exponential to divide by
            return weighted_values(jnp.zeros(logits.shape, value.dtype), value, precision=precision)
        return cached_inline_jit(_attend, precision)(logits, value)

    heads, key_heads = query.shape[-2], key.shape[-2]
    is_each_or_all = all(
        x is None or np.ndim(x) < 3 or np.shape(x)[-3] in (1, heads) for x in (bias, mask)
    )
    if heads == key_heads or value.shape[-2] != key_heads or not is_each_or_all:
        return attend(query, key, value, bias, mask)
    # Mapped over the query heads of a key head. XLA for TPUs fuses little into matmuls whose heads
    # are reshaped.
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, query.shape[-1])
    bias, bias_axis = _by_key_head(bias, key_heads)
    mask, mask_axis = _by_key_head(mask, key_heads)
    result = jax.vmap(attend, (-2, None, None, bias_axis, mask_axis), -2)(
        grouped, key, value, bias, mask
    )
    return result.reshape(*result.shape[:-3], heads, result.shape[-1])


def _by_key_head(x: ArrayLike | None, key_heads: int) -> tuple[Array | None, int | None]:
    """Splits the heads of a bias or mask (B..., N, T, S): (B..., K, N / K, T, S), and the axis to
    map over, if any.
    """
    if x is None or np.ndim(x) < 3 or np.shape(x)[-3] == 1:
        return (None if x is None else jnp.asarray(x)), None
    x = jnp.asarray(x)
    return x.reshape(*x.shape[:-3], key_heads, -1, *x.shape[-2:]), -3


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(precision: PrecisionLike, logits: Array, value: Array) -> Array:
    """Computes softmax(logits) value, rounded once.

    Its residual is the exponentials in the values' dtype.
    """
    return _exponentials(precision, logits, value)[2].astype(value.dtype)


def _exponentials(
    precision: PrecisionLike, logits: Array, value: Array
) -> tuple[Array, Array, Array]:
    """Returns the exponentials (B..., N, T, S) in half, their sums (B..., T, N, 1), and the
    unrounded result.
    """
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    exponentials = jnp.exp(logits - highest).astype(value.dtype)
    # Of the rounded ones, which every matmul multiplies: so the weights add up to 1, and the
    # gradient by a row's logits to 0, but for float32's rounding.
    total = jnp.swapaxes(jnp.sum(exponentials.astype(logits.dtype), axis=-1, keepdims=True), -2, -3)
    weigh = accumulating(functools.partial(weighted_values, precision=precision), logits.dtype)
    return exponentials, total, weigh(exponentials, value) / total


def _attend_jvp(
    precision: PrecisionLike, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    logits, value = primals
    exponentials, total, exact = _exponentials(precision, logits, value)
    result = exact.astype(value.dtype)
    rounded_off = (exact - result.astype(exact.dtype)).astype(value.dtype)
    given = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    half = jnp.finfo(value.dtype)
    wide = functools.partial(lax.convert_element_type, new_dtype=logits.dtype)

    def derivative(kept: Sequence[Array], logits_tangent: Any, value_tangent: Any) -> Array:
        exponentials, total, result, rounded_off, value = kept
        through = jnp.zeros_like(result, logits.dtype)
        if logits_tangent is not None:
            moved = wide(exponentials) / jnp.swapaxes(total, -2, -3) * logits_tangent
            along = jnp.swapaxes(jnp.sum(moved, axis=-1, keepdims=True), -2, -3)
            sums = weighted_values(moved.astype(value.dtype), value, precision=precision)
            rounded = jnp.where(total < 1 + float(half.eps) / 4, _rounded(along, half), along)
            through = wide(sums) - rounded * wide(result) - along * wide(rounded_off)
        if value_tangent is not None:
            sums = weighted_values(exponentials, value_tangent, precision=precision)
            through = through + wide(sums) / total
        return through.astype(value.dtype)

    # Checkpointed, so that nothing is kept but the exponentials and what is as small as the result.
    # Behind the barrier XLA can't keep the logits instead, which are twice as large, and take the
    # exponentials again.
    kept = (lax.optimization_barrier(exponentials), total, result, rounded_off, value)
    return result, jax.checkpoint(derivative, prevent_cse=False)(kept, *given)


_attend.defjvp(_attend_jvp, symbolic_zeros=True)


def _rounded(x: Array, half: Any) -> Array:
    """Rounds to a dtype of 16 bits, in the transpose too, as a matmul rounds its result.

    Of a row with a weight of almost 1 the result is that key's value. Backward subtracts the mean
    of the cotangents of a row's weights, which is the result times its cotangent, from each of
    them, which a matmul rounded: what is left of the large one is exact if both were rounded.
    """
    return lax.reduce_precision(x, half.nexp, half.nmant)


def _weighted_codes(precision: PrecisionLike, logits: Array, codes: Array, scale: Array) -> Array:
    """Computes softmax(logits) (codes * scale), rounded once.

    The exponentials are multiplied by the scales, and where half precision has not their range,
    divided by the largest product, so that it is 1.
    """
    exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    scaled = exponentials * by_query_head(scale, logits.shape[-3]).astype(logits.dtype)
    tiny = np.asarray(jnp.finfo(logits.dtype).tiny, logits.dtype)
    if jnp.finfo(codes.dtype).tiny > tiny:
        largest = jnp.maximum(jnp.max(scaled, axis=-1, keepdims=True), tiny)
        scaled, total = scaled / largest, total / largest
    weigh = accumulating(functools.partial(weighted_values, precision=precision), logits.dtype)
    sums = weigh(scaled.astype(codes.dtype), codes)
    return (sums / jnp.swapaxes(total, -2, -3)).astype(codes.dtype)


def dot_product_attention_weights(
    query: Array,
    key: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    precision: PrecisionLike = None,
    einsum: Callable[..., Array] | None = None,
    reduction_dtype: DTypeLike = jnp.float32,
    soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    key_scale: Array | None = None,
) -> Array:
    """Computes softmax(q k^T / sqrt(H) + bias) over the keys, in `reduction_dtype` from the
    matmul's accumulator on.

    Axes: B batch (any number), T query, S key, N query heads, K key heads (a divisor of N), H head
    width. This is `jax.nn.dot_product_attention`'s contract: logits and softmax are never rounded
    to the operands' dtype.

    Args:
      query: (B..., T, N, H), half or full precision.
      key: (B..., S, K, H), the same dtype.
      bias: added to the logits; broadcastable to (B..., N, T, S).
      mask: False (or 0) masks a pair out; broadcastable to (B..., N, T, S). A row without any key
        left is uniform.
      is_causal: masks out the keys after each query.
      precision: as in `jax.lax`.
      einsum: computes the logits instead of ours, `einsum(subscripts, query, key)`.
      reduction_dtype: the dtype of logits and softmax; at least float32.
      soft_cap: limits the logits before the bias to +-soft_cap, ``soft_cap * tanh(logits /
        soft_cap)``, as Gemma 2 does (arXiv:2408.00118, section 2); None does not.
      dtype: of the weights; None is `reduction_dtype`. Backward keeps the weights in it, nothing
        else of their size.
      key_scale: (B..., S, K, 1), which the logits of a key are multiplied by; None is 1.

    Returns:
      (B..., N, T, S) in `dtype`.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> weights = attention.dot_product_attention_weights(x, x)
      >>> weights.shape, weights.dtype
      ((2, 4, 5, 5), dtype('float32'))
    """
    check_shapes(query, key)
    options = (is_causal, reduction_dtype, soft_cap, key_scale, einsum)
    logits = _logits(query, key, bias, mask, precision, *options)
    if dtype is None or logits.dtype == dtype:
        return jax.nn.softmax(logits, axis=-1)
    return cached_inline_jit(_rounded_softmax, jnp.dtype(dtype))(logits)


def _logits(
    query: Array,
    key: Array,
    bias: Array | None,
    mask: Array | None,
    precision: PrecisionLike,
    is_causal: bool,
    reduction_dtype: DTypeLike,
    soft_cap: float | None,
    key_scale: Array | None,
    einsum: Callable[..., Array] | None = None,
) -> Array:
    """Computes q k^T / sqrt(H) + bias, masked: (B..., N, T, S), the matmul's accumulator in
    `reduction_dtype`.
    """
    heads, key_heads = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(query.shape[-1])
    is_bare = einsum is None and bias is None and mask is None and not is_causal
    is_bare = is_bare and soft_cap is None and key_scale is None
    if is_bare and _is_scaled_ahead(scale, query, key):
        query, scale = query * np.asarray(scale, query.dtype), 1.0
    if einsum is not None:
        logits = einsum("...qhd,...khd->...hqk", query, key).astype(reduction_dtype)
    elif heads == key_heads:
        logits = _dot("...qhd,...khd->...hqk", query, key, precision, reduction_dtype)
    else:
        groups = (key_heads, heads // key_heads)
        grouped = query.reshape(*query.shape[:-2], *groups, query.shape[-1])  # (B..., T, K, G, H)
        logits = _dot("...qhgd,...khd->...hgqk", grouped, key, precision, reduction_dtype)
        logits = logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])  # (B..., N, T, S)
    if key_scale is not None:
        rows = by_query_head(key_scale, heads).astype(logits.dtype)
        logits = logits * (rows * np.asarray(scale, logits.dtype))
    elif scale != 1:
        logits = logits * np.asarray(scale, logits.dtype)
    if soft_cap is not None:
        cap = np.asarray(soft_cap, logits.dtype)
        logits = jnp.tanh(logits / cap) * cap
    if bias is not None:
        logits = logits + jnp.asarray(bias, logits.dtype)
    if mask is not None or is_causal:
        logits = keeping_inputs_once(_masked, is_causal)(logits, mask)
    return logits


def by_query_head(scale: Array, heads: int) -> Array:
    """Returns scales of keys or values (B..., S, K, 1) beside the weights of N heads.

    Returns:
      (B..., N, 1, S).

    Example:
      >>> attention.by_query_head(jnp.ones((2, 7, 2, 1)), 4).shape
      (2, 4, 1, 7)
    """
    rows = jnp.swapaxes(scale, -3, -1)  # (B..., 1, K, S)
    return jnp.repeat(jnp.swapaxes(rows, -3, -2), heads // scale.shape[-2], axis=-3)


def _is_scaled_ahead(scale: float, query: Array, key: Array) -> bool:
    """Returns whether to scale the queries and not their products with the keys.

    A power of two rounds nothing in bfloat16, which has float32's exponents. XLA for TPUs then
    makes one kernel of the product and its exponentials: faster, but for lengths that it pads to
    128. With a causal mask between the two it made none, and moved work to the queries.
    """
    is_exact = query.dtype == jnp.bfloat16 and math.frexp(scale)[0] == 0.5
    lengths = query.shape[-3], key.shape[-3]  # of `jax.export` they may be symbols
    return is_exact and all(isinstance(n, int) and n % 128 == 0 for n in lengths)


def _masked(is_causal: bool, logits: Array, mask: Array | None) -> Array:
    """Lowers the logits where `mask` is False (or 0) and, where causal, at the keys after each
    query.
    """
    allowed = jnp.ones((1,) * logits.ndim, bool) if mask is None else jnp.asarray(mask).astype(bool)
    allowed = jnp.broadcast_to(allowed, logits.shape)
    if is_causal:
        queries, keys = (
            lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - axis) for axis in (2, 1)
        )
        allowed = jnp.logical_and(allowed, keys <= queries)
    # Half of the lowest number: a bias on top of it can't reach -inf, and a row of it is uniform,
    # not NaN.
    low = np.asarray(0.5 * float(jnp.finfo(logits.dtype).min), logits.dtype)
    return jnp.where(allowed, logits, low)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded_softmax(dtype: np.dtype, logits: Array) -> Array:
    """Computes softmax over the last axis, rounded once to `dtype`.

    Its residual is the rounded weights alone.
    """
    return jax.nn.softmax(logits, axis=-1).astype(dtype)


@_rounded_softmax.defjvp
def _rounded_softmax_jvp(
    dtype: np.dtype, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    weights = _rounded_softmax(dtype, primals[0])

    def derivative(weights: Array, tangent: Array) -> Array:
        wide = weights.astype(tangent.dtype)
        # Rounded weights sum to almost 1: dividing by that sum keeps the gradient's own sum over
        # the keys at 0.
        mean = jnp.sum(wide * tangent, -1, keepdims=True) / jnp.sum(wide, -1, keepdims=True)
        return (wide * (tangent - mean)).astype(dtype)

    # Checkpointed whole: that sum too is had again from the weights, in the pass of backward that
    # reads them anyway.
    return weights, jax.checkpoint(derivative, prevent_cse=False)(weights, tangents[0])


def weighted_values(
    weights: Array,
    value: Array,
    *,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Sums the values by attention weight.

    Args:
      weights: (B..., N, T, S), the values' dtype.
      value: (B..., S, K, H), K a divisor of N.
      preferred_element_type: of the result; None is the values' dtype.

    Returns:
      (B..., T, N, H).

    Example:
      >>> weights, value = jnp.ones((2, 4, 5, 7)), jnp.ones((2, 7, 4, 8))
      >>> attention.weighted_values(weights, value).shape
      (2, 5, 4, 8)
    """
    heads, value_heads = weights.shape[-3], value.shape[-2]
    einsum = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=preferred_element_type
    )
    if heads == value_heads:
        return einsum("...hqk,...khd->...qhd", weights, value)
    groups = (value_heads, heads // value_heads)
    grouped = weights.reshape(*weights.shape[:-3], *groups, *weights.shape[-2:])
    out = einsum("...hgqk,...khd->...qhgd", grouped, value)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def _dot(
    subscripts: str, lhs: Array, rhs: Array, precision: PrecisionLike, dtype: DTypeLike
) -> Array:
    """Computes an einsum of two operands.

    Returns its accumulator where `dtype` is wider than they are.
    """
    if not is_wider(dtype, lhs.dtype):
        return jnp.einsum(subscripts, lhs, rhs, precision=precision)
    return cached_inline_jit(_accumulated, subscripts, precision, jnp.dtype(dtype))(lhs, rhs)


def _accumulated(
    subscripts: str, precision: PrecisionLike, dtype: np.dtype, lhs: Array, rhs: Array
) -> Array:
    einsum = functools.partial(jnp.einsum, subscripts, precision=precision)
    return accumulating(einsum, dtype)(lhs, rhs)


def dropout(
    weights: Array, rate: float, *, broadcast: bool, batch_axes: int, rng: Array | None
) -> Array:
    """Drops attention weights with probability `rate` and scales the rest by 1 / (1 - rate), as
    Flax does.

    Args:
      weights: (B..., N, T, S).
      rate: in [0, 1).
      broadcast: whether all batch entries and heads share one mask.
      batch_axes: how many batch axes there are.
      rng: the key; the mask is the one that Flax draws from it.

    Example:
      >>> key = jax.random.key(0)
      >>> weights = jnp.ones((2, 4, 5, 7), jnp.bfloat16)
      >>> attention.dropout(weights, 0.5, broadcast=True, batch_axes=1, rng=key).dtype
      dtype(bfloat16)
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {rate!r}.")
    if rng is None:
        raise ValueError("dropout_rng is required when dropout_rate > 0 and deterministic=False.")
    shape = (1,) * (batch_axes + 1) + weights.shape[-2:] if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    scale = np.asarray(1.0 - rate, weights.dtype)
    return weights * (keep.astype(weights.dtype) / scale)
