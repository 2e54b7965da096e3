"""The chunks of `linear_softmax_cross_entropy`, and its derivative rule.

A chunk's logits are multiplied a part at a time, in the accumulators' dtype, and turned into the
loss's derivatives by them ("slopes"), in the operands' dtype. Both gradients are one matmul of a
whole chunk's slopes each: the sum of the kernel's gradient is read and written once a chunk.

Where operands are multiplied in float32, the slopes of the labels are left out of these matmuls:
beside a label's term all others are small, and an accumulator that holds it would round each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from policy.core.arrays import alike_varying, is_typed, make_varying, varying_axes
from policy.core.reverse_mode import in_reverse_mode
from policy.functions.losses import class_indices

_FLOAT16_SCALE = 2.0**10  # of slopes in float16: most are far below 1, and few above


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a loss, as a static argument.

    Attributes:
      operands: the dtype that is multiplied.
      wide: the dtype of accumulators, sums and the loss.
      axis: the axis of the classes in the kernel.
      axis_names: the mesh axes that the classes are split over by `jax.shard_map`.
      smoothing, z_loss, soft_cap: as in `linear_softmax_cross_entropy`.
      chunks: the number of chunks.
      parts: the number of parts of each.
      size: the number of examples of a part.
      adds_labels: whether the labels' terms are added to the gradients outside of the matmuls.
      reduces: whether the loss is a sum.
      is_on_mesh: whether a mesh is in force, whose axes XLA splits arrays over.
    """

    operands: np.dtype
    wide: np.dtype
    axis: int
    axis_names: tuple[Any, ...]
    smoothing: float
    z_loss: float
    soft_cap: float | None
    chunks: int
    parts: int
    size: int
    adds_labels: bool
    reduces: bool
    is_on_mesh: bool


def loss_of(options: Options, x: Array, labels: Array, weight: Array, *parameters: Array) -> Array:
    """Computes the weighted loss of each example, or their sum.

    Args:
      x: (..., d).
      labels: (...) integers.
      weight: (...), in the accumulators' dtype.
      *parameters: the kernel, and the bias if there is one.
    """
    operands = alike_varying(x, *parameters)
    x, *operands = (in_reverse_mode(_NO_FORWARD_MODE, one) for one in operands)
    shape, count = labels.shape, labels.size
    x, labels, weight = x.reshape(count, x.shape[-1]), labels.reshape(count), weight.reshape(count)
    loss: Any = _loss(options, x, labels, weight, *operands)
    return loss if options.reduces else loss.reshape(shape)


# --------------------------------------------------------------------------------------------------
# The derivative rule
# --------------------------------------------------------------------------------------------------


_NO_FORWARD_MODE = (
    "linear_softmax_cross_entropy has no derivative in forward mode (jax.jvp, jax.jacfwd, "
    "jax.linearize, jax.hessian). Take it in reverse mode (jax.grad, jax.jacrev), or compute the "
    "logits and take policy.losses.softmax_cross_entropy_with_integer_labels."
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: Options, x: Array, labels: Array, weight: Array, *parameters: Array) -> Array:
    losses, _ = _in_chunks(options, x, labels, None, *parameters)
    return _weighted(options, losses, weight)


def _weighted(options: Options, losses: Array, weight: Array) -> Array:
    losses = jnp.where(weight == 0, 0, losses * weight)
    return jnp.sum(losses) if options.reduces else losses


def _loss_forward(options: Options, *operands: Array) -> tuple[Array, Any]:
    if not options.reduces:
        return _loss(options, *operands), (None, operands)
    losses, gradients = _gradients(options, *operands)
    marks = [jnp.zeros((0,), array.dtype) for array in operands]
    return _weighted(options, losses, operands[2]), (gradients, marks)


def _loss_backward(options: Options, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    gradients, (x, labels, weight, *parameters) = saved
    # All devices of the classes' axes return a loss alike. Where types don't tell so
    # (``check_vma=False``), each has a share of its cotangent.
    untyped = tuple(axis for axis in options.axis_names if not is_typed(axis))
    if untyped:
        cotangent = lax.psum(cotangent, untyped)
    if gradients is None:
        weight = jnp.where(weight == 0, 0, cotangent * weight)
        weight = make_varying(weight, varying_axes(x))
        _, gradients = _gradients(options, x, labels, weight, *parameters)
    else:
        gradients = [cotangent * gradient.astype(options.wide) for gradient in gradients]
    of_x, *rest = (
        gradient.astype(array.dtype)
        for gradient, array in zip(gradients, (x, *parameters), strict=True)
    )
    return of_x, None, None, *rest


_loss.defvjp(_loss_forward, _loss_backward)


def _gradients(
    options: Options, x: Array, labels: Array, weight: Array, *parameters: Array
) -> tuple[Array, list[Array]]:
    """Returns the losses, and the gradients of their weighted sum, in the accumulators' dtype.

    In float16, slopes are multiplied by weights of at most `_FLOAT16_SCALE`, for their range.
    """
    if options.operands != jnp.float16:
        return _in_chunks(options, x, labels, weight, *parameters)
    largest = jnp.max(jnp.abs(weight), initial=0)
    factor = jnp.where(largest == 0, 0, _FLOAT16_SCALE / jnp.where(largest == 0, 1, largest))
    losses, gradients = _in_chunks(options, x, labels, weight * factor, *parameters)
    gradients = [gradient.astype(options.wide) for gradient in gradients]
    return losses, [gradient * (largest / _FLOAT16_SCALE) for gradient in gradients]


# --------------------------------------------------------------------------------------------------
# Chunks
# --------------------------------------------------------------------------------------------------


def _in_chunks(
    options: Options, x: Array, labels: Array, weight: Any, kernel: Array, bias: Any = None
) -> tuple[Array, list[Array]]:
    """Returns the losses of all examples, and the gradients of x, the kernel and the bias or [].

    Without weights there are no gradients.
    """
    count, stored = labels.size, x.dtype
    padding = (0, options.chunks * options.parts * options.size - count)
    x, labels = jnp.pad(x, (padding, (0, 0))), jnp.pad(labels, padding)
    weight = None if weight is None else jnp.pad(weight, padding)
    parameters = [a for a in (kernel, bias) if a is not None] if weight is not None else []
    zeros = [jnp.zeros_like(a, dtype=options.wide) for a in parameters]
    zeros = [make_varying(zero, varying_axes(x)) for zero in zeros]
    zeros[:1] = [_whole_in_features(options, zero) for zero in zeros[:1]]
    kernel = _whole_in_features(options, kernel.astype(options.operands))

    rows = jax.tree.map(functools.partial(_rows, options), (x, labels, weight))

    def read(index: Array) -> tuple[Array, Array, Any]:
        at = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
        x, labels, weight = jax.tree.map(at, rows)
        if weight is not None:  # an example of weight 0 may hold anything
            x = jnp.where(weight[..., None] == 0, 0, x)
        # XLA for TPU multiplies more slowly where a slice is fused into the matmul.
        return lax.optimization_barrier(x.astype(options.operands)), labels, weight

    def step(sums: list[Array], index: Array) -> tuple[list[Array], Any]:
        losses, of_x, of_labels, parts = _chunk(options, read, index, kernel, bias)
        if of_x is not None and stored == jnp.bfloat16 and of_labels is None:
            of_x = of_x.astype(stored)  # half the memory; float16 is scaled yet
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return sums, (losses, of_x, of_labels)

    if options.chunks == 1:
        sums, out = step(zeros, jnp.int32(0))
        out = jax.tree.map(lambda a: a[None], out)
    else:
        sums, out = lax.scan(step, zeros, jnp.arange(options.chunks))
    losses, of_x, slopes = jax.tree.map(lambda a: _in_order(options, a)[:count], out)
    if weight is None:
        return losses, []
    if slopes is not None:
        x, labels = jnp.where(weight[:, None] == 0, 0, x)[:count], labels[:count]
        term, sums[0] = _add_labels(options, x, labels, slopes, kernel, sums[0])
        of_x = of_x + term
    sums[:1] = [_whole_in_features(options, total) for total in sums[:1]]
    return losses, [of_x, *sums]


def _add_labels(
    options: Options, x: Array, labels: Array, slopes: Array, kernel: Array, of_kernel: Array
) -> tuple[Array, Array]:
    """Returns the labels' terms of the gradient of x, (examples, d), and the kernel's gradient with
    them.

    Args:
      slopes: (examples,): the derivatives by the labels' logits, 0 where another device has these.
    """
    classes = kernel.shape[options.axis]
    labels = jnp.clip(_local_labels(options, labels, classes)[0], 0, classes - 1)
    at = (slice(None), labels) if options.axis else labels
    x, chosen = slopes[:, None] * x.astype(options.wide), kernel[at].astype(options.wide)
    x, chosen = (x.T, chosen.T) if options.axis else (x, chosen)
    return slopes[:, None] * chosen, of_kernel.at[at].add(x)


def _rows(options: Options, array: Array) -> Array:
    """Returns (chunks, parts, examples of a part, ...).

    On a mesh, parts take every n-th example: those of each are spread over all devices of a split
    batch.
    """
    counts, rest = (options.chunks, options.parts), array.shape[1:]
    if not options.is_on_mesh:
        return array.reshape(*counts, options.size, *rest)
    return jnp.moveaxis(array.reshape(options.size, *counts, *rest), 0, 2)


def _in_order(options: Options, array: Array) -> Array:
    """Returns the rows (examples, ...) of (chunks, parts, examples of a part, ...)."""
    array = jnp.moveaxis(array, 2, 0) if options.is_on_mesh else array
    return array.reshape(math.prod(array.shape[:3]), *array.shape[3:])


def _whole_in_features(options: Options, kernel: Array) -> Array:
    """Returns a kernel, or the gradient of one, that is not split along its features.

    Where XLA splits arrays over a mesh it would otherwise gather the kernel and sum its gradient
    over the devices in each turn of the loop, instead of once.
    """
    if not options.is_on_mesh:
        return kernel
    classes = PartitionSpec.UNCONSTRAINED
    spec = (None, classes) if options.axis else (classes, None)
    return lax.with_sharding_constraint(kernel, PartitionSpec(*spec))


def _chunk(
    options: Options, read: Any, index: Array, kernel: Array, bias: Any
) -> tuple[Array, Any, Any, list[Array]]:
    """Returns a chunk's losses, and with weights its gradient of x, the labels' slopes where they
    are separate, and its gradients of the kernel and the bias.

    Args:
      read: returns of an index the chunk's x, (parts, examples of a part, d), in the operands'
        dtype, and its labels and weights, (parts, examples of a part).
      kernel: in the operands' dtype.
      bias: as it is stored, or None.
    """
    rows = read(index)
    dot = functools.partial(lax.dot_general, preferred_element_type=options.wide)

    def part(rows: tuple[Array, Array, Any]) -> tuple[Array, Any, Any, Any]:
        x, labels, weight = rows
        logits = dot(lax.optimization_barrier(x), kernel, (((1,), (1 - options.axis,)), ((), ())))
        return _loss_and_slope(options, logits, labels, weight, bias)

    if options.parts == 1:
        out = part(jax.tree.map(lambda a: a[0], rows))
        losses, slope, of_labels, of_bias = jax.tree.map(lambda a: a[None], out)
    else:
        losses, slope, of_labels, of_bias = lax.map(part, rows)
    if slope is None:
        return losses, None, None, []
    slope = lax.optimization_barrier(slope)  # or XLA computes it again for each tile of a product
    of_x = dot(slope, kernel, (((2,), (options.axis,)), ((), ())))
    # Read again: XLA for TPU moves the first reading out of the chip's own memory by now, and then
    # multiplies more slowly.
    index, of_x = lax.optimization_barrier((index, of_x))
    pair = (read(index)[0], slope) if options.axis else (slope, read(index)[0])
    of_kernel = dot(*pair, (((0, 1), (0, 1)), ((), ())))
    return losses, of_x, of_labels, [of_kernel, *(jnp.sum(part, 0) for part in of_bias)]


# --------------------------------------------------------------------------------------------------
# Logits, losses and slopes
# --------------------------------------------------------------------------------------------------


def _loss_and_slope(
    options: Options, logits: Array, labels: Array, weight: Any, bias: Array | None
) -> tuple[Array, Any, Any, list[Array]]:
    """Returns the losses (examples,) of products, their weighted slopes, the labels' slopes where
    they are separate, and the slopes' sums for a bias.

    Slopes are None without weights, otherwise in the operands' dtype, and 0 at labels that are
    separate. They are summed before they are rounded. Every logit is read relative to the largest,
    as in `softmax_cross_entropy_with_integer_labels`. A label out of range makes its loss NaN.
    """
    if bias is not None:
        logits = logits + bias.astype(options.wide)[None]
    cap, names, smoothing = options.soft_cap, options.axis_names, options.smoothing
    tanh = None if cap is None else jnp.tanh(logits / cap)
    logits = logits if tanh is None or cap is None else cap * tanh
    smoothed = smoothing / (logits.shape[1] * (lax.axis_size(names) if names else 1))
    labels, is_class = _local_labels(options, labels[:, None], logits.shape[1])
    chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels
    largest = lax.stop_gradient(jnp.max(logits, 1, keepdims=True))
    largest = lax.pmax(largest, names) if names else largest
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    logits = logits - largest
    powers = jnp.exp(logits)
    parts = [jnp.where(chosen, 0, powers), jnp.where(chosen, logits, 0)]
    parts += [logits] if smoothing else []
    sums = [jnp.sum(part, 1, keepdims=True) for part in parts]
    others, target, *every = lax.psum(sums, names) if names else sums
    # The label's probability less 1 is that of the others, without a difference.
    own = jnp.exp(target)
    total, is_likely = own + others, others < own
    rest = jnp.log(total)
    loss = jnp.where(is_likely, jnp.log1p(others / jnp.where(is_likely, own, 1)), rest - target)
    if smoothing:
        loss = loss + smoothing * target - smoothed * every[0]
    if options.z_loss:
        loss = loss + options.z_loss * jnp.square(largest + rest)
    loss = jnp.where(is_class, loss, jnp.nan)[:, 0]
    if weight is None:
        return loss, None, None, []
    of_z = 2 * options.z_loss * (largest + rest) if options.z_loss else 0
    total = jnp.where(is_class, total, jnp.nan)
    of_label = (own * of_z - others) / total + smoothing
    slope = jnp.where(chosen, of_label, powers * ((1 + of_z) / total)) - smoothed
    slope = slope if tanh is None else slope * (1 - jnp.square(tanh))
    weight = weight[:, None]
    slope = jnp.where(weight == 0, 0, slope * weight)
    of_bias = [] if bias is None else [jnp.sum(slope, 0)]
    if not options.adds_labels:
        return loss, slope.astype(options.operands), None, of_bias
    of_label = jnp.sum(jnp.where(chosen, slope, 0), 1)
    return loss, jnp.where(chosen, 0, slope).astype(options.operands), of_label, of_bias


def _local_labels(options: Options, labels: Array, classes: int) -> tuple[Array, Array]:
    """Returns labels as int32 beside a device's first class, and which of them are a class.

    Negative labels count from the end.

    Args:
      classes: the number of a device's classes.
    """
    names = options.axis_names
    whole = classes * (lax.axis_size(names) if names else 1)
    labels = class_indices(labels, whole)
    is_class = (labels >= 0) & (labels < whole)
    labels = jnp.where(is_class, labels, 0).astype(jnp.int32)
    return labels - (lax.axis_index(names) * classes if names else 0), is_class
