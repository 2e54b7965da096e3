"""Losses in reduction_dtype.

Of (batch, classes) logits, cross-entropy with integer labels materializes the exponential of the
forward sum as the backend decides (XLA:CPU: one float32 buffer, as many bytes as optax takes in
bfloat16; nothing if the exponential is fused into the sum) and the gradient in the logits' own
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from policy.core.scope import reduction_dtype_of
from policy.functions.checkpointing import as_stored, keeping_inputs
from policy.functions.reductions import in_reduction_dtype

# --------------------------------------------------------------------------------------------------
# Softmax cross-entropy, with integer or dense labels
# --------------------------------------------------------------------------------------------------


ClassAxis = int | tuple[int, ...]


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
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
    labels = class_indices(jnp.expand_dims(labels, axis), logits.shape[axis])  # (..., 1)
    options = _Options(axis, label_smoothing, z_loss, wide)
    return _sparse_cross_entropy(logits, labels, where, options).squeeze(axis)


def _check_labels(labels: tuple[int, ...], logits: tuple[int, ...], axis: Any) -> None:
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = {a % len(logits) for a in given if logits}
    examples = tuple(length for i, length in enumerate(logits) if i not in axes)
    pairs = zip(labels, examples, strict=False)
    if len(labels) != len(examples) or not all(1 in pair or len({*pair}) == 1 for pair in pairs):
        raise ValueError(
            f"labels should have the shape of logits without the class axis, {examples}, but got "
            f"{labels} for logits of shape {logits}."
        )


def _class_mask(where: ArrayLike | None, logits: Array, axis: Any) -> Array | None:
    """Returns `where` in the shape of the logits.

    As in optax, a mask of another rank masks examples.
    """
    if where is None:
        return None
    where = jnp.asarray(where, bool)
    if where.ndim != logits.ndim:
        where = jnp.expand_dims(where, axis)
    return jnp.broadcast_to(where, logits.shape)


def _flat_classes(x: Array, axes: tuple[int, ...]) -> Array:
    """Moves `axes` to the end of `x`, in their order, and flattens them into one."""
    x = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    return x.reshape(*x.shape[: x.ndim - len(axes)], -1)


def class_indices(labels: Array, classes: int) -> Array:
    """Returns labels in an integer dtype that can count all classes, with negative ones wrapped."""
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
        return labels
    return jnp.where(labels < 0, labels + classes, labels)


class _Options(NamedTuple):
    """The options of a cross-entropy with integer labels: the axis of the classes, the weights, and
    the dtype of the loss.
    """

    axis: int
    smoothing: float
    z_loss: float
    wide: np.dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _sparse_cross_entropy(logits: Array, labels: Array, where: Any, options: _Options) -> Array:
    return _sparse_forward(logits, labels, where, options)[0]


def _sparse_forward(
    logits: Array, labels: Array, where: Any, options: _Options
) -> tuple[Array, Array, Array]:
    """Returns the loss, the largest logit and the lse relative to it, each (..., 1)."""
    axis, smoothing, z_loss, wide = options
    logits = as_stored(logits)
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
) -> tuple[Array, Array]:
    axis, smoothing, z_loss, wide = options
    logits, labels, where = primals
    loss, largest, rest = _sparse_forward(logits, labels, where, options)

    def derivative(
        logits: Array, largest: Array, rest: Array, labels: Array, where: Any, tangent: Any
    ) -> Array:
        # One elementwise pass over the logits, whose transpose is one too: no scatter, no one-hot
        # matrix in memory.
        kept, shares = _smoothing_shares(smoothing, where, logits, axis, wide)
        classes = lax.broadcasted_iota(labels.dtype, logits.shape, axis % logits.ndim)
        relative = as_stored(logits).astype(wide) - largest
        probability = jnp.where(kept, jnp.exp(relative - rest), 0)
        if z_loss:
            probability = probability * (1 + 2 * z_loss * (largest + rest))
        target = jnp.where(classes == labels, np.asarray(1 - smoothing, wide), 0)
        slope = probability - (target + shares)
        if where is not None:  # an example without any class costs 0, even if its logits are NaN
            slope = jnp.where(jnp.any(where, axis, keepdims=True), slope, 0)
        return jnp.sum(slope * tangent.astype(wide), axis, keepdims=True)

    return loss, keeping_inputs(derivative)(logits, largest, rest, labels, where, tangents[0])


def _smoothing_shares(
    smoothing: float, where: Array | None, logits: Array, axis: Any, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Returns which classes count, and the share of label smoothing that each gets."""
    kept = jnp.ones((1,) * logits.ndim, bool) if where is None else where
    count = jnp.sum(jnp.broadcast_to(kept, logits.shape), axis, keepdims=True).astype(dtype)
    return kept, jnp.where(kept, smoothing / count, 0)


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
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

    def run(logits: Array, labels: Array) -> Array:
        if label_smoothing:
            _, shares = _smoothing_shares(label_smoothing, kept, logits, axis, logits.dtype)
            labels = (1 - label_smoothing) * labels + shares
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


def without_impossible(logs: Array, weights: Array, kept: Array | None = None) -> Array:
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


# --------------------------------------------------------------------------------------------------
# Losses that need no classes of their own: divergences, squares, cosines and CTC
# --------------------------------------------------------------------------------------------------


def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> Array:
    """Computes -labels log sigmoid(logits) - (1 - labels) log sigmoid(-logits), elementwise.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> logits, labels = jnp.zeros(2, jnp.bfloat16), jnp.array([0.0, 1.0])
    >>> loss = losses.sigmoid_binary_cross_entropy(logits, labels)
    >>> loss.dtype, f"{loss[0]:.3f}"
    (dtype('float32'), '0.693')

    Args:
      logits: floating, any shape.
      labels: probabilities of the same shape, or broadcastable to it.

    Returns:
      The shape of `logits`, in reduction_dtype.
    """
    return _returning_reduction_dtype(optax.sigmoid_binary_cross_entropy, logits, labels)


def squared_error(predictions: ArrayLike, targets: ArrayLike | None = None) -> Array:
    """Computes (predictions - targets)^2 elementwise in reduction_dtype.

    Without targets it computes predictions^2.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> losses.squared_error(jnp.array([300.0], jnp.float16))
    Array([90000.], dtype=float32)

    Args:
      predictions: floating, any shape.
      targets: of the same shape; None stands for zeros.

    Returns:
      The shape of `predictions`.
    """
    given = (predictions,) if targets is None else (predictions, targets)
    return _returning_reduction_dtype(optax.squared_error, *given)


def _returning_reduction_dtype(function: Callable[..., Any], *arrays: ArrayLike) -> Array:
    return in_reduction_dtype(function, *arrays, dtype=reduction_dtype_of(*arrays))


def kl_divergence(
    log_predictions: ArrayLike,
    targets: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Computes sum(targets (log(targets) - log_predictions)) over `axis`, in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> half = jnp.array([0.5, 0.5])
    >>> f"{losses.kl_divergence(jnp.log(half), jnp.array([1.0, 0.0])):.3f}"
    '0.693'

    Args:
      log_predictions: (..., K) log probabilities.
      targets: (..., K) probabilities; a target of 0 adds 0.
      axis: the axis, or axes, of the K classes.
      where: broadcastable to them; False leaves an element out.

    Returns:
      (...), without `axis`.
    """

    def run(log_predictions: Array, targets: Array) -> Array:
        logs = jnp.log(jnp.where(targets == 0, 1, targets))
        return jnp.sum(_divergence(targets, logs, log_predictions), axis, where=where)

    return _returning_reduction_dtype(run, log_predictions, targets)


def kl_divergence_with_log_targets(
    log_predictions: ArrayLike,
    log_targets: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Computes sum(exp(log_targets) (log_targets - log_predictions)), in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> half = jnp.log(jnp.array([0.5, 0.5], jnp.bfloat16))
    >>> losses.kl_divergence_with_log_targets(half, half)
    Array(0., dtype=float32)

    Args:
      log_predictions, log_targets: (..., K) log probabilities; a target of -inf adds 0.
      axis: the axis, or axes, of the K classes.
      where: broadcastable to them; False leaves an element out.

    Returns:
      (...), without `axis`.
    """

    def run(log_predictions: Array, log_targets: Array) -> Array:
        targets = jnp.exp(log_targets)
        logs = jnp.where(log_targets == -jnp.inf, 0, log_targets)
        return jnp.sum(_divergence(targets, logs, log_predictions), axis, where=where)

    return _returning_reduction_dtype(run, log_predictions, log_targets)


@jax.custom_jvp
def _divergence(targets: Array, log_targets: Array, log_predictions: Array) -> Array:
    """Computes targets (log_targets - log_predictions); a target of 0 gives 0."""
    return targets * (log_targets - without_impossible(log_predictions, targets))


def _divergence_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    # By hand, so that backward keeps the predictions for the targets' own gradient only.
    targets, log_targets, log_predictions = primals
    out = _divergence(*primals)
    by_targets, by_log_targets, by_predictions = tangents
    tangent = jnp.zeros_like(out)
    if not isinstance(by_predictions, SymbolicZero):
        tangent = tangent - targets * by_predictions
    if not isinstance(by_log_targets, SymbolicZero):
        tangent = tangent + targets * by_log_targets
    if not isinstance(by_targets, SymbolicZero):
        logs = log_targets - without_impossible(log_predictions, targets)
        tangent = tangent + logs * by_targets
    return out, tangent


_divergence.defjvp(_divergence_jvp, symbolic_zeros=True)


def ctc_loss(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    blank_id: int = 0,
    log_epsilon: float = -1e5,
) -> Array:
    """Computes `optax.ctc_loss` in reduction_dtype.

    Connectionist temporal classification: Graves et al. 2006.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> logits, logit_paddings = jnp.zeros((1, 4, 3), jnp.bfloat16), jnp.zeros((1, 4))
    >>> labels, label_paddings = jnp.array([[1, 2]]), jnp.zeros((1, 2))
    >>> jax.eval_shape(losses.ctc_loss, logits, logit_paddings, labels, label_paddings)
    ShapeDtypeStruct(shape=(1,), dtype=float32)

    Args:
      logits: (B, T, K) floating.
      logit_paddings: (B, T), 1 for padding frames.
      labels: (B, N) integers.
      label_paddings: (B, N), 1 for padding labels.
      blank_id: the class of the blank.
      log_epsilon: stands for log(0).

    Returns:
      (B,) in reduction_dtype.
    """

    def run(logits: Array, logit_paddings: Array, label_paddings: Array) -> Array:
        with jax.numpy_rank_promotion("allow"):  # optax relies on it
            operands = logits, logit_paddings, jnp.asarray(labels), label_paddings
            return optax.ctc_loss(*operands, blank_id=blank_id, log_epsilon=log_epsilon)

    given = (logits, logit_paddings, label_paddings)
    return in_reduction_dtype(run, *given, dtype=reduction_dtype_of(logits))


def cosine_similarity(
    predictions: ArrayLike,
    targets: ArrayLike,
    epsilon: ArrayLike = 0.0,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the cosine of the angle between predictions and targets, in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> f"{losses.cosine_similarity(jnp.array([3.0, 0.0]), jnp.array([1.0, 1.0])):.3f}"
    '0.707'

    Args:
      predictions, targets: (..., d) floating.
      epsilon: the least squared norm, as in optax.
      axis: the axis, or axes, of the d elements.
      where: broadcastable to them; False leaves an element out.

    Returns:
      (...), between -1 and 1.
    """

    run = functools.partial(optax.cosine_similarity, epsilon=epsilon, axis=axis, where=where)
    return _returning_reduction_dtype(run, predictions, targets)


def cosine_distance(
    predictions: ArrayLike,
    targets: ArrayLike,
    epsilon: ArrayLike = 0.0,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    """Computes 1 - `cosine_similarity`, in reduction_dtype.

    Arguments as in `cosine_similarity`.

    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> losses.cosine_distance(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))
    Array(1., dtype=float32)

    Returns:
      (...), between 0 and 2.
    """
    return 1.0 - cosine_similarity(predictions, targets, epsilon, axis, where)
