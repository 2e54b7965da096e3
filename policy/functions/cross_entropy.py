"""Softmax cross-entropy in reduction_dtype, with integer or dense labels.

Of (batch, classes) logits, cross-entropy with integer labels materialises the exponential of the
forward sum as the backend decides (XLA:CPU: one float32 buffer, as many bytes as optax takes in
bfloat16; nothing if the exponential is fused into the sum) and the gradient in the logits' own
dtype.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from policy.functions.checkpointing import keeping_inputs
from policy.functions.widening import in_reduction_dtype, reduction_dtype_of

ClassAxis = int | tuple[int, ...]


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Computes -log softmax(logits)[label], with label smoothing and z-loss.

    With classes K, smoothing s and z-loss weight z the loss is ``lse - (1 - s) logits[label] - s
    mean(logits) + z lse^2``, where lse = log sum exp(logits) (Szegedy et al. 2016, "Rethinking the
    Inception Architecture"; z-loss: Chowdhery et al. 2022, "PaLM", section 5).

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> logits = jnp.array([[2.0, 0.0], [0.0, 2.0]], jnp.bfloat16)
    >>> loss = losses.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 0]))
    >>> loss.dtype
    dtype('float32')
    >>> [f"{x:.3f}" for x in loss]
    ['0.127', '2.127']

    Args:
      logits: (..., K) floating (the classes along `axis`).
      labels: (...) integers in [0, K), of any width; a negative one counts from the end, as in
        NumPy.
      axis: the axis of the classes. With a tuple, a label is the flat index into those axes.
      where: of `logits`' rank and broadcastable to it: False leaves a class out of the softmax (and
        of the smoothing). (...), without the classes: False leaves an example out. An example
        without any class costs 0.
      label_smoothing: in [0, 1): the share of the target spread evenly over the classes.
      z_loss: at least 0: the weight of lse^2, which keeps the logits from drifting.

    Returns:
      (...) in reduction_dtype.

    Raises:
      ValueError: `labels` are not integers or have another shape, `logits` are complex, or a weight
        is out of range.
    """
    logits = jnp.asarray(logits)
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels should be integers, but got {labels.dtype}; softmax_cross_entropy takes dense "
            "labels."
        )
    _check_labels(labels.shape, logits.shape, axis)
    check_weights(label_smoothing, z_loss)

    if jnp.issubdtype(logits.dtype, jnp.complexfloating):
        raise ValueError(f"logits should be real, but got {logits.dtype}.")

    wide = reduction_dtype_of(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        logits = logits.astype(wide)
    where = _class_mask(where, logits, axis)
    if isinstance(axis, tuple):
        where = None if where is None else _flat_classes(where, axis)
        logits, axis = _flat_classes(logits, axis), -1
    labels = _class_indices(jnp.expand_dims(labels, axis), logits.shape[axis])  # (..., 1)
    options = _Options(axis, label_smoothing, z_loss, wide)
    return _sparse_cross_entropy(logits, labels, where, options).squeeze(axis)


def _check_labels(labels: tuple[int, ...], logits: tuple[int, ...], axis: Any) -> None:
    axes = (
        {a % len(logits) for a in (axis if isinstance(axis, tuple) else (axis,))}
        if logits
        else set()
    )
    examples = tuple(length for i, length in enumerate(logits) if i not in axes)
    fits = len(labels) == len(examples)
    if not (fits and all(1 in (a, b) or a == b for a, b in zip(labels, examples, strict=True))):
        raise ValueError(
            f"labels should have the shape of logits without the class axis, {examples}, but got "
            f"{labels} for logits of shape {logits}."
        )


def _class_mask(where: ArrayLike | None, logits: jax.Array, axis: Any) -> jax.Array | None:
    """Returns `where` in the shape of the logits.

    As in optax, a mask of another rank masks examples.
    """
    if where is None:
        return None
    where = jnp.asarray(where, bool)
    if where.ndim != logits.ndim:
        where = jnp.expand_dims(where, axis)
    return jnp.broadcast_to(where, logits.shape)


def _flat_classes(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Moves `axes` to the end of `x`, in their order, and flattens them into one."""
    x = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    return x.reshape(*x.shape[: x.ndim - len(axes)], -1)


def _class_indices(labels: jax.Array, classes: int) -> jax.Array:
    """Returns labels in an integer dtype that can count all classes, with negative ones wrapped."""
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    return (
        labels
        if jnp.issubdtype(labels.dtype, jnp.unsignedinteger)
        else jnp.where(labels < 0, labels + classes, labels)
    )


class _Options(NamedTuple):
    """The options of a cross-entropy with integer labels: the axis of the classes, the weights, and
    the dtype of the loss.
    """

    axis: int
    smoothing: float
    z_loss: float
    wide: np.dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _sparse_cross_entropy(
    logits: jax.Array, labels: jax.Array, where: Any, options: _Options
) -> jax.Array:
    return _sparse_forward(logits, labels, where, options)[0]


def _sparse_forward(
    logits: jax.Array, labels: jax.Array, where: Any, options: _Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the loss, the largest logit and the lse relative to it, each (..., 1)."""
    axis, smoothing, z_loss, wide = options
    largest = jnp.max(logits, axis, keepdims=True, where=where, initial=-jnp.inf)
    largest = lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0)).astype(wide)
    # Every logit minus the largest: lse and the chosen logit of a large mean would differ by too
    # few of their digits.
    some = None if where is None else jnp.any(where, axis, keepdims=True)
    total = jnp.sum(jnp.exp(logits.astype(wide) - largest), axis, keepdims=True, where=where)
    rest = jnp.log(total if some is None else jnp.where(some, total, 1))
    chosen = jnp.take_along_axis(logits, labels, axis=axis).astype(wide) - largest
    loss = rest - (1 - smoothing) * chosen
    if smoothing:
        loss = loss - smoothing * jnp.mean(
            logits.astype(wide) - largest, axis, where=where, keepdims=True
        )
    loss = loss + z_loss * jnp.square(largest + rest) if z_loss else loss
    return (loss if some is None else jnp.where(some, loss, 0)), largest, rest


@_sparse_cross_entropy.defjvp
def _sparse_jvp(
    options: _Options, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    axis, smoothing, z_loss, wide = options
    logits, labels, where = primals
    loss, largest, rest = _sparse_forward(logits, labels, where, options)

    def derivative(
        logits: jax.Array,
        largest: jax.Array,
        rest: jax.Array,
        labels: jax.Array,
        where: Any,
        tangent: Any,
    ) -> jax.Array:
        # One elementwise pass over the logits, whose transpose is one too: no scatter, no one-hot
        # matrix in memory.
        kept = jnp.ones((1,) * logits.ndim, bool) if where is None else where
        classes = lax.broadcasted_iota(labels.dtype, logits.shape, axis % logits.ndim)
        count = jnp.sum(jnp.broadcast_to(kept, logits.shape), axis, keepdims=True).astype(wide)
        probability = jnp.where(kept, jnp.exp(logits.astype(wide) - largest - rest), 0)
        if z_loss:
            probability = probability * (1 + 2 * z_loss * (largest + rest))
        target = jnp.where(classes == labels, np.asarray(1 - smoothing, wide), 0) + jnp.where(
            kept, smoothing / count, 0
        )
        slope = probability - target
        if where is not None:  # an example without any class costs 0, even if its logits are NaN
            slope = jnp.where(jnp.any(where, axis, keepdims=True), slope, 0)
        return jnp.sum(slope * tangent.astype(wide), axis, keepdims=True)

    return loss, keeping_inputs(derivative)(logits, largest, rest, labels, where, tangents[0])


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Computes -sum(labels log softmax(logits)), with label smoothing and z-loss.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> logits = jnp.array([[2.0, 0.0]], jnp.bfloat16)
    >>> [f"{x:.3f}" for x in losses.softmax_cross_entropy(logits, jnp.array([[0.5, 0.5]]))]
    ['1.127']

    Args:
      logits: (..., K) floating.
      labels: (..., K) probabilities over the classes, floating or one-hot integers; a class of
        probability 0 adds 0.
      axis, where, label_smoothing, z_loss: as in `softmax_cross_entropy_with_integer_labels`.

    Returns:
      (...) in reduction_dtype.

    Raises:
      ValueError: a weight is out of range, or `labels` are class indices.
    """
    if jnp.ndim(labels) < jnp.ndim(logits) and jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise ValueError(
            f"labels should be probabilities over the classes, but got {jnp.result_type(labels)} "
            f"of shape {jnp.shape(labels)} for logits of shape {jnp.shape(logits)}. "
            "softmax_cross_entropy_with_integer_labels takes class indices."
        )
    check_weights(label_smoothing, z_loss)
    kept = _class_mask(where, jnp.asarray(logits), axis)

    def run(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if label_smoothing:
            some = jnp.ones((1,) * logits.ndim, bool) if kept is None else kept
            count = jnp.sum(jnp.broadcast_to(some, logits.shape), axis, keepdims=True).astype(
                logits.dtype
            )
            labels = (1 - label_smoothing) * labels + jnp.where(some, label_smoothing / count, 0)
        # An example without any class left: over all of them, so that no NaN comes back where its
        # loss counts 0.
        classes = None if kept is None else kept | ~jnp.any(kept, axis, keepdims=True)
        logs = without_impossible(jax.nn.log_softmax(logits, axis, classes), labels, kept)
        loss = -jnp.sum(labels * logs, axis, where=kept)
        if not z_loss:
            return loss
        squared = z_loss * jnp.square(jax.scipy.special.logsumexp(logits, axis, where=classes))
        return loss + (squared if kept is None else jnp.where(jnp.any(kept, axis), squared, 0))

    return in_reduction_dtype(run, logits, labels, dtype=reduction_dtype_of(logits, labels))


def without_impossible(
    logs: jax.Array, weights: jax.Array, kept: jax.Array | None = None
) -> jax.Array:
    """Returns log-probabilities to be multiplied by `weights`, without NaN.

    They are 0 where a weight of 0 meets -inf, or where `kept` is False.
    """
    impossible = (weights == 0) & (logs == -jnp.inf)
    return jnp.where(impossible if kept is None else impossible | ~kept, 0, logs)


def check_weights(label_smoothing: float, z_loss: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing should be in [0, 1), but got {label_smoothing!r}.")
    if z_loss < 0:
        raise ValueError(f"z_loss should be at least 0, but got {z_loss!r}.")
