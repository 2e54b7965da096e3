"""Losses in reduction_dtype: half-precision logits in, float32 losses out.

The logits are widened inside the loss, and what backward keeps of half logits is those logits: it computes the softmax
again from them. Results are in reduction_dtype: float32 under every policy but float64's.

What cross-entropy with integer labels materialises of (batch, classes) logits is what the backend makes of exp in the
forward sum (XLA:CPU: one float32 buffer, as many bytes as optax takes in bfloat16; nothing where the exponential is
fused into the sum) and the gradient in the logits' own dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from policy.reductions import reduction_dtype, widely
from policy.remembering import keeping_inputs

Axis = int | tuple[int, ...]


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """-log softmax(logits)[label], with label smoothing and z-loss.

    With classes K, smoothing s and z-loss weight z: ``lse - (1 - s) logits[label] - s mean(logits) + z lse^2``, where
    lse = log sum exp(logits) (Szegedy et al. 2016, "Rethinking the Inception Architecture"; z-loss: Chowdhery et al.
    2022, "PaLM", section 5).

    Args:
      logits: (..., K) floating (the classes along `axis`).
      labels: (...) integers in [0, K).
      axis: the axis of the classes.
      where: broadcastable to `logits`; False leaves a class out of the softmax (and of the smoothing).
      label_smoothing: in [0, 1): the share of the target spread evenly over the classes.
      z_loss: at least 0: the weight of lse^2, which keeps the logits from drifting.

    Returns:
      (...) in reduction_dtype.

    Raises:
      ValueError: `labels` are no integers, or a weight is out of range.
    """
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels should be integers, but got {labels.dtype}; softmax_cross_entropy takes dense ones.")
    _check_weights(label_smoothing, z_loss)

    logits, wide = jnp.asarray(logits), reduction_dtype(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        logits = logits.astype(wide)
    labels = jnp.expand_dims(labels, axis)  # (..., 1)
    return _sparse_cross_entropy(logits, labels, where, axis, label_smoothing, z_loss, wide).squeeze(axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _sparse_cross_entropy(
    logits: jax.Array, labels: jax.Array, where: Any, axis: int, smoothing: float, z_loss: float, wide: Any
) -> jax.Array:
    return _sparse_forward(logits, labels, where, axis, smoothing, z_loss, wide)[0]


def _sparse_forward(
    logits: jax.Array, labels: jax.Array, where: Any, axis: int, smoothing: float, z_loss: float, wide: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss, the largest logit, and the lse of the logits minus that, all (..., 1)."""
    largest = jnp.max(logits, axis, keepdims=True, where=where, initial=-jnp.inf)
    largest = lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0)).astype(wide)
    # Every logit minus the largest: lse and the chosen logit of a large mean would differ by too few of their digits.
    rest = jnp.log(jnp.sum(jnp.exp(logits.astype(wide) - largest), axis, keepdims=True, where=where))
    chosen = jnp.take_along_axis(logits, labels, axis=axis).astype(wide) - largest
    loss = rest - (1 - smoothing) * chosen
    if smoothing:
        loss = loss - smoothing * jnp.mean(logits.astype(wide) - largest, axis, where=where, keepdims=True)
    return (loss + z_loss * jnp.square(largest + rest) if z_loss else loss), largest, rest


@_sparse_cross_entropy.defjvp
def _sparse_jvp(
    axis: int, smoothing: float, z_loss: float, wide: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    logits, labels, where = primals
    loss, largest, rest = _sparse_forward(logits, labels, where, axis, smoothing, z_loss, wide)

    def derivative(
        logits: jax.Array, largest: jax.Array, rest: jax.Array, labels: jax.Array, where: Any, tangent: Any
    ) -> jax.Array:
        # One elementwise pass over the logits, whose transpose is one too: no scatter, no one-hot matrix in memory.
        kept = jnp.ones((1,) * logits.ndim, bool) if where is None else jnp.asarray(where, bool)
        classes = lax.broadcasted_iota(labels.dtype, logits.shape, axis % logits.ndim)
        count = jnp.sum(jnp.broadcast_to(kept, logits.shape), axis, keepdims=True).astype(wide)
        probability = jnp.where(kept, jnp.exp(logits.astype(wide) - largest - rest), 0)
        if z_loss:
            probability = probability * (1 + 2 * z_loss * (largest + rest))
        target = jnp.where(classes == labels, np.asarray(1 - smoothing, wide), 0) + jnp.where(
            kept, smoothing / count, 0
        )
        return jnp.sum((probability - target) * tangent.astype(wide), axis, keepdims=True)

    return loss, keeping_inputs(derivative)(logits, largest, rest, labels, where, tangents[0])


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """-sum(labels log softmax(logits)), with label smoothing and z-loss.

    Args:
      logits: (..., K) floating.
      labels: (..., K) probabilities over the classes, floating or one-hot integers; a class of probability 0 adds 0.
      axis, where, label_smoothing, z_loss: as in `softmax_cross_entropy_with_integer_labels`.

    Returns:
      (...) in reduction_dtype.

    Raises:
      ValueError: a weight is out of range.
    """
    _check_weights(label_smoothing, z_loss)

    def run(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if label_smoothing:
            labels = optax.smooth_labels(labels, label_smoothing) if where is None else _smoothed(labels, where)
        loss = optax.softmax_cross_entropy(logits, labels, axis, where)
        if not z_loss:
            return loss
        return loss + z_loss * jnp.square(jax.scipy.special.logsumexp(logits, axis, where=where))

    def _smoothed(labels: jax.Array, where: ArrayLike) -> jax.Array:
        kept = jnp.broadcast_to(jnp.asarray(where), labels.shape)
        count = jnp.sum(kept, axis, keepdims=True).astype(labels.dtype)
        return (1 - label_smoothing) * labels + label_smoothing / count * kept.astype(labels.dtype)

    return widely(run, logits, labels, dtype=reduction_dtype(logits, labels))


def _check_weights(label_smoothing: float, z_loss: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing should be in [0, 1), but got {label_smoothing!r}.")
    if z_loss < 0:
        raise ValueError(f"z_loss should be at least 0, but got {z_loss!r}.")


def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> jax.Array:
    """-labels log sigmoid(logits) - (1 - labels) log sigmoid(-logits), elementwise.

    Args:
      logits: floating, any shape; `labels`: probabilities of the same shape, or broadcastable to it.

    Returns:
      The shape of `logits`, in reduction_dtype.
    """
    return widely(optax.sigmoid_binary_cross_entropy, logits, labels, dtype=reduction_dtype(logits, labels))


def squared_error(predictions: ArrayLike, targets: ArrayLike | None = None) -> jax.Array:
    """(predictions - targets)^2, elementwise, in reduction_dtype; without targets predictions^2."""
    given = (predictions,) if targets is None else (predictions, targets)
    return widely(optax.squared_error, *given, dtype=reduction_dtype(*given))


def kl_divergence(log_predictions: ArrayLike, targets: ArrayLike, axis: Axis = -1) -> jax.Array:
    """sum(targets (log(targets) - log_predictions)) over `axis`, in reduction_dtype; a target of 0 adds 0.

    Args:
      log_predictions: (..., K) log probabilities; `targets`: (..., K) probabilities.
    """

    def run(log_predictions: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.kl_divergence(log_predictions, targets, axis=axis)

    return widely(run, log_predictions, targets, dtype=reduction_dtype(log_predictions, targets))


def kl_divergence_with_log_targets(log_predictions: ArrayLike, log_targets: ArrayLike, axis: Axis = -1) -> jax.Array:
    """sum(exp(log_targets) (log_targets - log_predictions)) over `axis`, in reduction_dtype."""

    def run(log_predictions: jax.Array, log_targets: jax.Array) -> jax.Array:
        return optax.losses.kl_divergence_with_log_targets(log_predictions, log_targets, axis=axis)

    return widely(run, log_predictions, log_targets, dtype=reduction_dtype(log_predictions, log_targets))


def ctc_loss(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    blank_id: int = 0,
    log_epsilon: float = -1e5,
) -> jax.Array:
    """Connectionist temporal classification (Graves et al. 2006): `optax.ctc_loss` in reduction_dtype.

    Args:
      logits: (B, T, K) floating.
      logit_paddings: (B, T), 1 where a frame is padding; `label_paddings`: (B, N) likewise.
      labels: (B, N) integers.
      blank_id: the class of the blank.
      log_epsilon: stands for log(0).

    Returns:
      (B,) in reduction_dtype.
    """

    def run(logits: jax.Array, logit_paddings: jax.Array, label_paddings: jax.Array) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):  # optax relies on it
            return optax.ctc_loss(
                logits, logit_paddings, jnp.asarray(labels), label_paddings, blank_id=blank_id, log_epsilon=log_epsilon
            )

    return widely(run, logits, logit_paddings, label_paddings, dtype=reduction_dtype(logits))


def cosine_similarity(predictions: ArrayLike, targets: ArrayLike, epsilon: float = 0.0, axis: Axis = -1) -> jax.Array:
    """The cosine of the angle between predictions and targets over `axis`, in reduction_dtype.

    Args:
      predictions, targets: (..., d) floating.
      epsilon: the least norm that is divided by.

    Returns:
      (...): between -1 and 1.
    """

    def run(predictions: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.cosine_similarity(predictions, targets, epsilon=epsilon, axis=axis)

    return widely(run, predictions, targets, dtype=reduction_dtype(predictions, targets))


def cosine_distance(predictions: ArrayLike, targets: ArrayLike, epsilon: float = 0.0, axis: Axis = -1) -> jax.Array:
    """1 - `cosine_similarity`, in reduction_dtype."""
    return 1.0 - cosine_similarity(predictions, targets, epsilon, axis)
