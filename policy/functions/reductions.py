"""Reductions, softmaxes and accumulators of matmuls, in reduction_dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike
from numpy.lib.array_utils import normalize_axis_index

from policy.core.arrays import is_floating, is_inexact
from policy.core.dtypes import precision_around
from policy.core.scope import reduction_dtype_of, widest
from policy.functions.checkpointing import as_stored, keeping_inputs

__all__ = [
    "cumprod",
    "cumsum",
    "einsum",
    "global_norm",
    "in_reduction_dtype",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "mean",
    "reduction_dtype_of",
    "segment_sum",
    "softmax",
    "softplus",
    "standardize",
    "std",
    "var",
]

Axis = int | Sequence[int] | None


def in_reduction_dtype(
    function: Callable[..., Any], *arrays: Any, dtype: DTypeLike | None = None
) -> Any:
    """Calls ``function(*arrays)`` in reduction_dtype and rounds floating results once to `dtype`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> x = jnp.full(4096, 0.1, jnp.bfloat16)
    >>> y = reductions.in_reduction_dtype(lambda x: x.sum() - 400, x)
    >>> y.dtype, f"{float(y):.1f}"
    (dtype(bfloat16), '10.0')

    Args:
      function: arrays in, a tree of arrays out; pure.
      *arrays: floating arrays of any shapes; integers are widened too, None is passed on.
      dtype: of the results; None is the floating dtype that the arrays promote to, float32 for
        integers.
    """
    given = [x for x in arrays if x is not None]
    wide = reduction_dtype_of(*given)
    floating = [jnp.result_type(x) for x in given if is_inexact(x)]
    out = jnp.dtype(dtype) if dtype is not None else widest(floating) if floating else wide

    def run(*arrays: Any) -> Any:
        results = function(*(None if x is None else _as(as_stored(x), wide) for x in arrays))
        return jax.tree.map(lambda y: _as(y, out) if is_inexact(y) else y, results)

    if all(dtype == wide for dtype in floating):
        return run(*arrays)  # nothing was widened: nothing to keep small
    return keeping_inputs(run)(*arrays)


def _as(x: Any, dtype: DTypeLike) -> Array:
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x
    return x if x.dtype == dtype and is_floating(x) else x.astype(dtype)


# --------------------------------------------------------------------------------------------------
# Softmax and its relatives
# --------------------------------------------------------------------------------------------------


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes exp(x) / sum(exp(x)) over `axis`: `jax.nn.softmax` in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.softmax(jnp.zeros(4, jnp.bfloat16))
    Array([0.25, 0.25, 0.25, 0.25], dtype=bfloat16)

    Args:
      x: floating, any shape.
      axis: the axes along which the result sums to one.
      where: False leaves an entry out; it gets 0.
      initial: accepted for the signature of older versions; unused, as in JAX.
      dtype: of the result; None is x's.

    Returns:
      x's shape; 0 everywhere if `where` leaves no entry.
    """
    return in_reduction_dtype(lambda x: jax.nn.softmax(x, axis, where=where), x, dtype=dtype)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes x - log(sum(exp(x))) over `axis`: `jax.nn.log_softmax` in reduction_dtype.

    Arguments as in `softmax`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.log_softmax(jnp.zeros(2, jnp.bfloat16), dtype=jnp.float32)
    Array([-0.6931472, -0.6931472], dtype=float32)

    Returns:
      x's shape; -inf where `where` leaves an entry out.
    """
    return in_reduction_dtype(lambda x: jax.nn.log_softmax(x, axis, where=where), x, dtype=dtype)


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Any:
    """Computes log(sum(b * exp(x))) over `axis`: `jax.scipy.special.logsumexp` in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> f"{float(reductions.logsumexp(jnp.zeros(4, jnp.bfloat16), dtype=jnp.float32)):.3f}"
    '1.386'

    Args:
      a: floating, any shape.
      axis: the axes to sum over; None is all of them.
      b: factors, broadcastable to a; None is ones.
      keepdims: whether the summed axes stay, with length 1.
      return_sign: whether the sign of the sum is returned too, for sums that may be negative.
      where: False leaves an entry out.
      dtype: of the result; None is a's.

    Returns:
      a's shape without `axis` (with 1 in its place if `keepdims`), in `dtype` or a's; with
      `return_sign` a pair with the sign of the sum. An empty axis gives -inf.
    """

    options = {"keepdims": keepdims, "return_sign": return_sign, "where": where}

    def run(a: Array, b: Array | None) -> Any:
        return jax.scipy.special.logsumexp(a, axis, b, **options)

    return in_reduction_dtype(run, a, b, dtype=dtype)


def log_sigmoid(x: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """Computes -log(1 + exp(-x)) elementwise in reduction_dtype; returns `dtype` or x's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.log_sigmoid(jnp.zeros((), jnp.float16), dtype=jnp.float32)
    Array(-0.6931472, dtype=float32)
    """
    return in_reduction_dtype(jax.nn.log_sigmoid, x, dtype=dtype)


def softplus(x: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """Computes log(1 + exp(x)) elementwise in reduction_dtype; returns `dtype` or x's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.softplus(jnp.float16(20))
    Array(20., dtype=float16)
    """
    return in_reduction_dtype(jax.nn.softplus, x, dtype=dtype)


# --------------------------------------------------------------------------------------------------
# Means, variances and sums
# --------------------------------------------------------------------------------------------------


def mean(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the arithmetic mean over `axis`, summed in reduction_dtype; returns `dtype` or x's.

    Integers give reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> float(reductions.mean(jnp.full(4, 60000, jnp.float16)))
    60000.0

    Args:
      x: any shape.
      axis: the axes to average over; None is all of them.
      dtype: of the result; None is x's.
      keepdims: whether those axes stay, with length 1.
      where: broadcastable to x; False leaves an entry out.

    Returns:
      x's shape without `axis`.
    """
    run = functools.partial(jnp.mean, axis=axis, keepdims=keepdims, where=where)
    return in_reduction_dtype(run, x, dtype=dtype)


def var(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the variance over `axis`, in two passes in reduction_dtype.

    Returns `dtype` or x's (real) dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.var(jnp.array([1000.0, 1002.0], jnp.float16))
    Array(1., dtype=float16)

    Args:
      x: floating or complex, any shape.
      axis: the axes of the variance; None is all of them.
      dtype: of the result; None is x's real dtype.
      ddof: is subtracted from the count of elements in the divisor, as in NumPy.
      keepdims: whether those axes stay, with length 1.
      where: broadcastable to x; False leaves an entry out.

    Returns:
      x's shape without `axis`.
    """
    return _spread(jnp.var, x, axis, dtype, ddof=ddof, keepdims=keepdims, where=where)


def std(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the standard deviation over `axis`, in two passes in reduction_dtype.

    Returns `dtype` or x's (real) dtype. Arguments as in `var`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.std(jnp.array([-300.0, 300.0], jnp.float16))
    Array(300., dtype=float16)
    """
    return _spread(jnp.std, x, axis, dtype, ddof=ddof, keepdims=keepdims, where=where)


def _spread(
    function: Any, x: ArrayLike, axis: Axis, dtype: DTypeLike | None, **options: Any
) -> Array:
    own = jnp.result_type(x)
    if dtype is None and jnp.issubdtype(own, jnp.complexfloating):
        dtype = jnp.finfo(own).dtype  # of the real part
    return in_reduction_dtype(lambda x: function(x, axis, **options), x, dtype=dtype)


def standardize(
    x: ArrayLike,
    axis: Axis = -1,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    epsilon: float = 1e-5,
    where: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes (x - mean) / sqrt(variance + epsilon) over `axis` in reduction_dtype.

    Returns `dtype` or x's.

    A variance that is not given is computed in two passes, unlike `jax.nn.standardize`, whose
    E[x^2] - E[x]^2 cancels where the mean is large.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.standardize(jnp.array([999.0, 1001.0], jnp.float16))
    Array([-1.,  1.], dtype=float16)

    Args:
      x: floating, any shape.
      axis: the axes of the statistics.
      mean, variance: broadcastable to x, or None to compute them over `axis`.
      epsilon: is added to the variance.
      where: broadcastable to x; False leaves an entry out of the statistics.
      dtype: of the result; None is x's.

    Returns:
      x's shape.
    """

    def run(x: Array, mean: Array | None, variance: Array | None) -> Array:
        centre = jnp.mean(x, axis, keepdims=True, where=where) if mean is None else mean
        centered = x - _expanded(centre, x)
        spread = variance
        if spread is None and mean is None:
            spread = jnp.mean(jnp.square(centered), axis, keepdims=True, where=where)
        elif spread is None:  # the variance about the data's own mean, even with another mean
            spread = jnp.var(x, axis, keepdims=True, where=where)
        return centered * jax.lax.rsqrt(_expanded(spread, x) + epsilon)

    return in_reduction_dtype(run, x, mean, variance, dtype=dtype)


def _expanded(statistic: Array, x: Array) -> Array:
    """Prepends axes of length 1 to a statistic, to broadcast it without rank promotion."""
    return statistic.reshape((1,) * (x.ndim - statistic.ndim) + statistic.shape)


def cumsum(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> Array:
    """Computes running sums along `axis` (of the flattened array if None) in reduction_dtype.

    Returns `dtype` or x's.

    Integers are summed as integers, exactly, and booleans are counted as in JAX, unless `dtype` is
    floating.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> float(reductions.cumsum(jnp.ones(4096, jnp.float16))[-1])
    4096.0

    Args:
      x: any shape; a scalar counts as (1,).
      axis: the axis to sum along; None flattens x first.
      dtype: of the result; None is x's.
      reverse: whether the sums start at the end.

    Returns:
      x's shape, or (x.size,) without an axis.

    Raises:
      ValueError: x has no such axis.
    """
    return _running(jax.lax.cumsum, x, axis, dtype, reverse)


def cumprod(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> Array:
    """Computes running products along `axis` (of the flattened array if None) in reduction_dtype.

    Returns `dtype` or x's. Integers, and arguments as in `cumsum`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.cumprod(jnp.full(4, 2, jnp.bfloat16))
    Array([2, 4, 8, 16], dtype=bfloat16)
    """
    return _running(jax.lax.cumprod, x, axis, dtype, reverse)


def _running(
    operation: Any, x: Any, axis: int | None, dtype: DTypeLike | None, reverse: bool
) -> Array:
    x = jnp.atleast_1d(jnp.asarray(x))
    x, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    along = normalize_axis_index(along, x.ndim)
    return _exactly_or_in_reduction_dtype(lambda x: operation(x, along, reverse=reverse), x, dtype)


def _exactly_or_in_reduction_dtype(
    function: Callable[[Array], Array], x: Any, dtype: DTypeLike | None
) -> Array:
    """Calls ``in_reduction_dtype(function, x)``; for integers, `function` in an integer dtype."""
    x = jnp.asarray(x)
    if is_inexact(x) or (dtype and jnp.issubdtype(dtype, jnp.inexact)):
        return in_reduction_dtype(function, x, dtype=dtype)
    wide = dtype or (jnp.dtype(int) if x.dtype == bool else x.dtype)
    return function(x.astype(jax.dtypes.canonicalize_dtype(wide)))


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> Array:
    """Sums the rows of `data` by segment in reduction_dtype, without a one-hot matrix.

    Returns `dtype` or data's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.segment_sum(jnp.ones(4, jnp.float16), jnp.array([0, 1, 1, 1]), 2)
    Array([1., 3.], dtype=float16)

    Args:
      data: (n, ...) floating; integers as in `cumsum`.
      segment_ids: (n,) integers; ids outside of [0, num_segments) are left out.
      num_segments: the number of segments; needed under jit.
      indices_are_sorted, unique_indices, bucket_size, mode: as in `jax.ops.segment_sum`.
      dtype: of the result; None is data's.

    Returns:
      (num_segments, ...).
    """

    ids = jnp.asarray(segment_ids)
    options = (num_segments, indices_are_sorted, unique_indices, bucket_size, mode)

    def run(data: Array) -> Array:
        return jax.ops.segment_sum(data, ids, *options)

    return _exactly_or_in_reduction_dtype(run, data, dtype)


def global_norm(tree: Any) -> Array:
    """Computes the l2 norm of all floating and complex arrays of a tree together.

    Squares and sums are in reduction_dtype. `optax.global_norm` of 4096 times 300 in float16 is
    inf; this is 19200.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.global_norm({"w": jnp.full(4096, 300, jnp.float16)})
    Array(19200., dtype=float32)

    Returns:
      () in reduction_dtype: float32, or wider if the tree is. 0 for an empty tree.
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    wide = reduction_dtype_of(*leaves)
    real = jnp.finfo(wide).dtype

    def sum_of_squares(x: Array) -> Array:
        return jnp.sum(jnp.real(x * jnp.conj(x))).astype(real)

    total = jnp.zeros((), real)
    for x in leaves:
        total = total + in_reduction_dtype(sum_of_squares, x, dtype=real)
    nothing = total == 0  # the norm has a corner there; its gradient is taken to be 0
    return jnp.where(nothing, 0, jnp.sqrt(jnp.where(nothing, 1, total)))


# --------------------------------------------------------------------------------------------------
# Matmuls that return their accumulator and multiply in half precision backward too
# --------------------------------------------------------------------------------------------------


def einsum(
    subscripts: str, lhs: ArrayLike, rhs: ArrayLike, *, precision: PrecisionLike = None
) -> Array:
    """Contracts two operands as `jnp.einsum` does and returns the unrounded accumulator.

    Use it for matmuls whose result goes into a softmax, a loss or a sum, such as the logits of a
    hand-written attention. The forward and the backward matmuls multiply in the operands' dtype;
    `preferred_element_type` alone would make both backward matmuls multiply float32 by half
    precision.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> q, k = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((3, 64), jnp.bfloat16)
    >>> policy.reductions.einsum("qd,kd->qk", q, k).dtype
    dtype('float32')

    Args:
      subscripts: as in `jnp.einsum`, for two operands.
      lhs, rhs: floating arrays of one dtype.
      precision: as in `jax.lax`.

    Returns:
      The contraction in the policy's reduction_dtype, or float32 without a policy; in the operands'
      dtype where that is wider.

    Raises:
      TypeError: an operand is not floating, or the two have different dtypes.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.inexact):
        raise TypeError(
            f"einsum takes two floating operands of one dtype, but got {lhs.dtype} and {rhs.dtype}."
        )
    contract = functools.partial(jnp.einsum, subscripts, precision=precision)
    wide = reduction_dtype_of(lhs)
    return contract(lhs, rhs) if wide == lhs.dtype else accumulating(contract, wide)(lhs, rhs)


def accumulating(
    bilinear: Callable[..., Array], accumulator_dtype: DTypeLike
) -> Callable[..., Array]:
    """Returns a bilinear operation that keeps its accumulator; backward keeps the operands' dtype.

    `bilinear(lhs, rhs, preferred_element_type=...)` is called forward with `accumulator_dtype`.
    With that alone, JAX would multiply float32 by half precision in both backward operations, or
    reject to (convolutions). Here the tangent is computed in the operands' dtype and then widened,
    so its transpose rounds the cotangent first. Forward and reverse mode both work. Further
    operands, such as the group sizes of a ragged matmul, are integers.
    """
    dtype = jnp.dtype(accumulator_dtype)
    precision = precision_around()  # a rule is traced after the block ended

    @jax.custom_jvp
    def run(lhs: Array, rhs: Array, *integers: Array) -> Array:
        with jax.default_matmul_precision(precision):
            return bilinear(lhs, rhs, *integers, preferred_element_type=dtype)

    def run_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Any]:
        y = run(*primals)
        pairs = ((tangents[0], primals[1]), (primals[0], tangents[1]))
        # a frozen operand costs nothing
        known = [pair for pair in pairs if not any(isinstance(x, SymbolicZero) for x in pair)]
        parts = [bilinear(*pair, *primals[2:]) for pair in known]
        return y, sum(parts[1:], parts[0]).astype(y.dtype) if parts else jnp.zeros_like(y)

    run.defjvp(run_jvp, symbolic_zeros=True)
    return run
