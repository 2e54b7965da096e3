"""Softmax cross-entropy of a linear layer's logits, a chunk of examples at a time.

The logits of all examples are never in memory together. A chunk's logits are multiplied, reduced
and, where the loss is differentiated, turned into its part of the gradients at once, so that
backward multiplies nothing again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from policy.core.arrays import alike_varying, is_typed, make_varying, varying_axes
from policy.core.dtypes import ScaledMatmul
from policy.core.scope import current_policy, reduction_dtype_of
from policy.eight_bits.scaled_matmul import scaled_dot_general
from policy.functions.losses import check_weights
from policy.programs.dtypes import explicit_sharding

_FEWEST, _MOST_CHUNKS = 1024, 8  # fewer examples multiply more slowly than the kernel is read
_FLOAT16_SCALE = 2.0**12  # of slopes in float16: at most 1 without it, and most far below


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a loss, as a static argument.

    Attributes:
      operands: the dtype that is multiplied.
      wide: the dtype of accumulators, sums and the loss.
      matmul: the 8-bit dtypes of the matmuls, or None.
      axis: the axis of the classes in the kernel.
      axis_name: the mesh axis that the classes are split over, or None.
      smoothing, z_loss, soft_cap: as in `linear_softmax_cross_entropy`.
      chunks: the number of chunks.
      reduction: as in `linear_softmax_cross_entropy`.
    """

    operands: np.dtype
    wide: np.dtype
    matmul: ScaledMatmul | None
    axis: int
    axis_name: Hashable
    smoothing: float
    z_loss: float
    soft_cap: float | None
    chunks: int
    reduction: str | None


def linear_softmax_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    ignored_label: int | None = None,
    reduction: Literal["mean", "sum"] | None = "mean",
    axis: int = -1,
    axis_name: Hashable = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
) -> Array:
    """Computes the cross-entropy of ``softmax(x @ kernel + bias)`` without the logits in memory.

    The loss is that of `softmax_cross_entropy_with_integer_labels` for these logits. Operands are
    multiplied in compute_dtype, or in the policy's 8 bits, also in backward; accumulators, the
    softmax, and the sums of both gradients over the chunks are in reduction_dtype. With a
    `reduction`, forward computes the gradients, and differentiating costs the three matmuls of a
    linear layer; without one, backward multiplies the logits again. References: Hsu et al. 2024,
    "Liger Kernel" (arXiv:2410.10989); Wijmans et al. 2024, "Cut Your Losses" (arXiv:2411.09009).

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16)
    >>> loss = losses.linear_softmax_cross_entropy(x, kernel, jnp.array([3, 5]))
    >>> loss.dtype, f"{loss:.4f}"  # log 8
    (dtype('float32'), '2.0794')

    Args:
      x: (..., d) floating: the inputs of the last linear layer.
      kernel: (d, K) floating; with ``axis=0`` (K, d), as the table of an embedding.
      labels: (...) integers in [0, K); negative ones count from the end.
      bias: (K,) floating, or None. It is added to the accumulators.
      weights: (...) of the examples, at least 0, which no gradient is computed for; an example of
        weight 0 may hold anything. None counts each once.
      ignored_label: examples with this label have weight 0.
      reduction: "mean" is the weighted mean, 0 if all weights are 0; "sum" the weighted sum; None
        returns the weighted loss of each example.
      axis: the axis of the classes in `kernel`.
      axis_name: inside `jax.shard_map`, the mesh axis that the classes of `kernel` and `bias` are
        split over; labels count the classes of all devices. Under `jax.jit` with sharded arrays,
        leave it None: XLA reduces over the devices by itself.
      label_smoothing, z_loss: as in `softmax_cross_entropy_with_integer_labels`.
      soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
      chunk_size: the number of examples whose logits are in memory together. None is an eighth
        of them, but at least 1024.

    Returns:
      A scalar, or (...) without a `reduction`, in reduction_dtype.

    Raises:
      TypeError: `x` or `kernel` is not floating, or `labels` are not integers.
      ValueError: shapes that don't fit, or an option out of range.
    """
    x, kernel, labels = jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    _check(x, kernel, labels, bias, axis)
    check_weights(label_smoothing, z_loss)
    if reduction not in ("mean", "sum", None):
        raise ValueError(f"reduction should be 'mean', 'sum' or None, but got {reduction!r}.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap should be positive, but got {soft_cap!r}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size should be at least 1, but got {chunk_size!r}.")
    if axis_name is not None:
        is_typed(axis_name)  # raises where it is not mapped
    policy, wide = current_policy(), reduction_dtype_of(x, kernel)
    size = chunk_size or max(_FEWEST, -(-labels.size // _MOST_CHUNKS))
    options = _Options(
        x.dtype if policy is None else policy.compute_dtype,
        wide,
        None if policy is None else policy.matmul,
        axis % 2,
        axis_name,
        label_smoothing,
        z_loss,
        soft_cap,
        max(1, -(-labels.size // size)),
        reduction,
    )
    weight = jnp.ones_like(labels, wide) if weights is None else jnp.asarray(weights, wide)
    weight = lax.stop_gradient(jnp.broadcast_to(weight, labels.shape))
    if ignored_label is not None:
        weight = jnp.where(labels == ignored_label, 0, weight)
    run: Any = functools.partial(_reduced, options)
    sharding = explicit_sharding(jax.typeof(x))
    if sharding is not None:
        spec = PartitionSpec(*(sharding.spec[:-1] if reduction is None else ()))
        run = jax.sharding.auto_axes(run, axes=sharding.mesh.axis_names, out_sharding=spec)
    return run(x, labels, weight, kernel, *([] if bias is None else [bias]))


def _check(x: Array, kernel: Array, labels: Array, bias: Array | None, axis: int) -> None:
    for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} should be floating, but got {array.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels should be integers, but got {labels.dtype}.")
    if axis not in (-2, -1, 0, 1):
        raise ValueError(f"axis should be 0 or -1, but got {axis!r}.")
    if x.ndim < 1 or kernel.ndim != 2 or kernel.shape[1 - axis % 2] != x.shape[-1]:
        expected = f"kernel {'(d, K)' if axis % 2 else '(K, d)'} for axis={axis}"
        got = f"{x.shape} and {kernel.shape}"
        raise ValueError(f"x should be (..., d) and {expected}, but got {got}.")
    if labels.shape != x.shape[:-1]:
        expected = f"the shape of x without its last axis, {x.shape[:-1]}"
        raise ValueError(f"labels should have {expected}, but got {labels.shape}.")
    if bias is not None and bias.shape != (kernel.shape[axis],):
        raise ValueError(f"bias should be ({kernel.shape[axis]},), but got {bias.shape}.")


def _reduced(
    options: _Options, x: Array, labels: Array, weight: Array, *parameters: Array
) -> Array:
    """Pads the examples to whole chunks, and returns the loss in the form that is asked for."""
    x, *operands = alike_varying(x, *parameters)
    shape, count = labels.shape, labels.size
    whole = jnp.sum(weight)
    padding = (0, -count % options.chunks)
    x = jnp.pad(x.reshape(count, x.shape[-1]), (padding, (0, 0)))
    labels, weight = (jnp.pad(a.reshape(count), padding) for a in (labels, weight))
    loss: Any = _loss(options, x, labels, weight, *operands)
    if options.reduction is None:
        return loss[:count].reshape(shape)
    return loss if options.reduction == "sum" else loss / jnp.where(whole == 0, 1, whole)


# --------------------------------------------------------------------------------------------------
# The derivative rule
# --------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: _Options, x: Array, labels: Array, weight: Array, *parameters: Array) -> Array:
    """Computes the weighted loss of each example, or with a reduction their sum."""
    losses, _ = _in_chunks(options, x, labels, None, *parameters)
    return _weighted(options, losses, weight)


def _weighted(options: _Options, losses: Array, weight: Array) -> Array:
    losses = jnp.where(weight == 0, 0, losses * weight)
    return losses if options.reduction is None else jnp.sum(losses)


def _loss_forward(options: _Options, *operands: Array) -> tuple[Array, Any]:
    if options.reduction is None:
        return _loss(options, *operands), (None, operands)
    losses, gradients = _gradients(options, *operands)
    marks = [jnp.zeros((0,), array.dtype) for array in operands]
    return _weighted(options, losses, operands[2]), (gradients, marks)


def _loss_backward(options: _Options, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    gradients, (x, labels, weight, *parameters) = saved
    # All devices of the classes' axis return a loss alike. Where types don't tell so
    # (``check_vma=False``), each has a share of its cotangent.
    if options.axis_name is not None and not is_typed(options.axis_name):
        cotangent = lax.psum(cotangent, options.axis_name)
    if gradients is None:
        weight = jnp.where(weight == 0, 0, cotangent * weight)
        weight = make_varying(weight, varying_axes(x))
        _, gradients = _gradients(options, x, labels, weight, *parameters)
    else:
        gradients = [cotangent * gradient for gradient in gradients]
    of_x, *rest = (
        gradient.astype(array.dtype)
        for gradient, array in zip(gradients, (x, *parameters), strict=True)
    )
    return of_x, None, None, *rest


_loss.defvjp(_loss_forward, _loss_backward)


# --------------------------------------------------------------------------------------------------
# Chunks
# --------------------------------------------------------------------------------------------------


def _gradients(
    options: _Options, x: Array, labels: Array, weight: Array, *parameters: Array
) -> tuple[Array, list[Array]]:
    """Returns the losses, and the gradients of their weighted sum, in the accumulators' dtype.

    Slopes are multiplied by weights of at most 1, so that they are in float16's range.
    """
    largest = jnp.max(jnp.abs(weight), initial=0)
    scale = _FLOAT16_SCALE if options.operands == jnp.float16 else 1.0
    factor = jnp.where(largest == 0, 0, scale / jnp.where(largest == 0, 1, largest))
    losses, gradients = _in_chunks(options, x, labels, weight * factor, *parameters)
    return losses, [gradient * (largest / scale) for gradient in gradients]


def _in_chunks(
    options: _Options, x: Array, labels: Array, weight: Any, kernel: Array, bias: Any = None
) -> tuple[Array, list[Array]]:
    """Returns the losses of all examples, and the gradients of x, the kernel and the bias or [].

    Without weights there are no gradients.
    """
    kernel, differentiates = kernel.astype(options.operands), weight is not None
    sums = [a for a in (kernel, bias) if a is not None] if differentiates else []
    zeros = [jnp.zeros_like(a, dtype=options.wide) for a in sums]
    zeros = [make_varying(zero, varying_axes(x)) for zero in zeros]

    def step(sums: list[Array], rows: tuple[Any, ...]) -> tuple[list[Array], Any]:
        x, labels, weight = rows
        logits, product = _product(options, x, kernel)
        loss, slope = _loss_and_slope(options, logits, labels, bias)
        if not differentiates:
            return sums, (loss, None)
        some = (weight != 0)[:, None]
        slope = jnp.where(some, slope * weight[:, None], 0)
        of_x, of_kernel = product(jnp.where(some, x, 0), slope)
        parts = [of_kernel, jnp.sum(slope, 0)][: len(sums)]
        return [total + part for total, part in zip(sums, parts, strict=True)], (loss, of_x)

    rows = jax.tree.map(functools.partial(_rows, options.chunks), (x, labels, weight))
    if options.chunks == 1:
        sums, out = step(zeros, jax.tree.map(lambda a: a[0], rows))
        losses, of_x = jax.tree.map(lambda a: a[None], out)
    else:
        sums, (losses, of_x) = lax.scan(step, zeros, rows)
    losses = losses.swapaxes(0, 1).reshape(-1)
    if not differentiates:
        return losses, []
    return losses, [of_x.swapaxes(0, 1).reshape(x.shape), *sums]


def _rows(chunks: int, array: Array) -> Array:
    """Returns (chunks, examples of a chunk, ...).

    Chunks take every n-th example: those of each are spread over all devices of a split batch.
    """
    return array.reshape(-1, chunks, *array.shape[1:]).swapaxes(0, 1)


def _product(options: _Options, x: Array, kernel: Array) -> tuple[Array, Any]:
    """Returns a chunk's logits, and the function of inputs and slopes to both gradients."""
    features = 1 - options.axis
    forward: Any = (((1,), (features,)), ((), ()))
    if options.matmul is not None:
        by, wide = options.matmul, options.wide

        def multiply(x: Array, kernel: Array) -> Array:
            return scaled_dot_general(x, kernel, forward, by, dtype=wide)

        logits, pullback = jax.vjp(multiply, x.astype(wide), kernel.astype(wide))
        return logits, lambda _, slope: pullback(slope)
    dot = functools.partial(lax.dot_general, preferred_element_type=options.wide)

    def gradients(x: Array, slope: Array) -> tuple[Array, Array]:
        x, slope = x.astype(options.operands), slope.astype(options.operands)
        of_x = dot(slope, kernel, (((1,), (options.axis,)), ((), ())))
        pair = (x, slope) if options.axis else (slope, x)
        return of_x, dot(*pair, (((0,), (0,)), ((), ())))

    return dot(x.astype(options.operands), kernel, forward), gradients


def _loss_and_slope(
    options: _Options, logits: Array, labels: Array, bias: Array | None
) -> tuple[Array, Array]:
    """Returns the losses (examples,) of a chunk's products, and their derivatives by these.

    Every logit is read relative to the largest, as in `softmax_cross_entropy_with_integer_labels`.
    """
    if bias is not None:
        logits = logits + bias.astype(options.wide)[None]
    cap = options.soft_cap
    tanh = None if cap is None else jnp.tanh(logits / cap)
    logits = logits if tanh is None or cap is None else cap * tanh
    count, first = logits.shape[1], 0
    if options.axis_name is not None:
        first = lax.axis_index(options.axis_name) * count
        count = count * lax.axis_size(options.axis_name)
    labels = labels.astype(jnp.int32)
    labels = jnp.where(labels < 0, labels + count, labels)[:, None] - first
    chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels
    largest = lax.stop_gradient(jnp.max(logits, 1, keepdims=True))
    largest = largest if options.axis_name is None else lax.pmax(largest, options.axis_name)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    logits = logits - largest
    powers = jnp.exp(logits)
    parts = [powers, jnp.where(chosen, logits, 0), *([logits] if options.smoothing else [])]
    sums = [jnp.sum(part, 1, keepdims=True) for part in parts]
    if options.axis_name is not None:
        sums = lax.psum(sums, options.axis_name)
    total, target, *every = sums
    rest, smoothing = jnp.log(total), options.smoothing
    loss = rest - (1 - smoothing) * target
    if smoothing:
        loss = loss - smoothing / count * every[0]
    slope = powers / total
    if options.z_loss:
        loss = loss + options.z_loss * jnp.square(largest + rest)
        slope = slope * (1 + 2 * options.z_loss * (largest + rest))
    slope = slope - jnp.where(chosen, 1 - smoothing, 0) - smoothing / count
    return loss[:, 0], slope if tanh is None else slope * (1 - jnp.square(tanh))
