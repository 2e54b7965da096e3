"""Losses that need no classes of their own: divergences, squares, cosines and CTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from policy.functions.cross_entropy import ClassAxis, without_impossible
from policy.functions.widening import in_reduction_dtype, reduction_dtype_of


def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> jax.Array:
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


def squared_error(predictions: ArrayLike, targets: ArrayLike | None = None) -> jax.Array:
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


def _returning_reduction_dtype(function: Callable[..., Any], *arrays: ArrayLike) -> jax.Array:
    return in_reduction_dtype(function, *arrays, dtype=reduction_dtype_of(*arrays))


def kl_divergence(
    log_predictions: ArrayLike,
    targets: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
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

    def run(log_predictions: jax.Array, targets: jax.Array) -> jax.Array:
        logs = jnp.log(jnp.where(targets == 0, 1, targets))
        return jnp.sum(_divergence(targets, logs, log_predictions), axis, where=where)

    return _returning_reduction_dtype(run, log_predictions, targets)


def kl_divergence_with_log_targets(
    log_predictions: ArrayLike,
    log_targets: ArrayLike,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
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

    def run(log_predictions: jax.Array, log_targets: jax.Array) -> jax.Array:
        targets = jnp.exp(log_targets)
        logs = jnp.where(log_targets == -jnp.inf, 0, log_targets)
        return jnp.sum(_divergence(targets, logs, log_predictions), axis, where=where)

    return _returning_reduction_dtype(run, log_predictions, log_targets)


@jax.custom_jvp
def _divergence(
    targets: jax.Array, log_targets: jax.Array, log_predictions: jax.Array
) -> jax.Array:
    """Computes targets (log_targets - log_predictions); a target of 0 gives 0."""
    return targets * (log_targets - without_impossible(log_predictions, targets))


def _divergence_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    # By hand, so that backward keeps the predictions for the targets' own gradient only.
    targets, log_targets, log_predictions = primals
    out = _divergence(*primals)
    by_targets, by_log_targets, by_predictions = (
        None if isinstance(t, SymbolicZero) else t for t in tangents
    )
    tangent = jnp.zeros_like(out)
    if by_predictions is not None:
        tangent = tangent - targets * by_predictions
    if by_log_targets is not None:
        tangent = tangent + targets * by_log_targets
    if by_targets is not None:
        tangent = (
            tangent + (log_targets - without_impossible(log_predictions, targets)) * by_targets
        )
    return out, tangent


_divergence.defjvp(_divergence_jvp, symbolic_zeros=True)


def ctc_loss(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    blank_id: int = 0,
    log_epsilon: float = -1e5,
) -> jax.Array:
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

    def run(logits: jax.Array, logit_paddings: jax.Array, label_paddings: jax.Array) -> jax.Array:
        with jax.numpy_rank_promotion("allow"):  # optax relies on it
            return optax.ctc_loss(
                logits,
                logit_paddings,
                jnp.asarray(labels),
                label_paddings,
                blank_id=blank_id,
                log_epsilon=log_epsilon,
            )

    return in_reduction_dtype(
        run, logits, logit_paddings, label_paddings, dtype=reduction_dtype_of(logits)
    )


def cosine_similarity(
    predictions: ArrayLike,
    targets: ArrayLike,
    epsilon: ArrayLike = 0.0,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
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

    def run(predictions: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.cosine_similarity(
            predictions, targets, epsilon=epsilon, axis=axis, where=where
        )

    return _returning_reduction_dtype(run, predictions, targets)


def cosine_distance(
    predictions: ArrayLike,
    targets: ArrayLike,
    epsilon: ArrayLike = 0.0,
    axis: ClassAxis | None = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
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
