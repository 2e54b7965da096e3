"""Calls of Flax's attention functions, alike in both wings: dropout, sown weights and the choice of
a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from mpmodules.calls.boundary import Crossing
from mpmodules.functions import attention
from mpmodules.functions.fused_attention.choose import Attention, fused_kernel
from policy.core.scope import current_policy

Array = jax.Array


class AttentionCrossing(Crossing):
    """The casts of an attention layer's call: its mask is left uncast, so that backward keeps one
    mask for all layers that are given it.
    """

    keeps: ClassVar[tuple[str, ...]] = ("mask",)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """The arguments for dropout in a call of Flax's attention.

    Attributes:
      broadcast: whether all batch entries and heads share one mask.
      rng: the key, or None.
      rate: the probability of dropping a weight.
      deterministic: whether none is dropped.
    """

    broadcast: bool
    rng: Array | None
    rate: float
    deterministic: bool

    @property
    def is_on(self) -> bool:
        """Returns whether weights are dropped."""
        return not self.deterministic and self.rate > 0.0


def reduction_dtype() -> np.dtype:
    """Returns the reduction_dtype of the policy in force; float32 where none is."""
    policy = current_policy()
    return jnp.dtype(jnp.float32) if policy is None else policy.reduction_dtype


def weights_of_call(
    query: Array,
    key: Array,
    dropout: Dropout,
    sow: Callable[[Array], object] | None,
    **options: Any,
) -> Array:
    """Computes attention weights in reduction_dtype, sows them, and drops some.

    Args:
      query: (B..., T, N, H).
      key: (B..., S, K, H), the same dtype.
      dropout: which weights to drop.
      sow: stores the weights before dropout; None does not.
      **options: for `mpmodules.functions.attention.dot_product_attention_weights`.

    Returns:
      (B..., N, T, S) in the `dtype` of the options.
    """
    weights = attention.dot_product_attention_weights(
        query, key, reduction_dtype=reduction_dtype(), **options
    )
    if sow is not None:
        sow(weights)
    if not dropout.is_on:
        return weights
    return attention.dropout(
        weights, dropout.rate, broadcast=dropout.broadcast, batch_axes=key.ndim - 3, rng=dropout.rng
    )


def kernel_of_call(
    implementation: str | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    dropout: Dropout,
    is_sown: bool,
    precision: PrecisionLike,
    others: dict[str, bool],
    **masks: Any,
) -> Attention | None:
    """Chooses the fused kernel to compute a call with, or None for XLA's program.

    Args:
      implementation: None chooses; a name insists.
      query: (B..., T, N, H).
      key: (B..., S, K, H), `value`: (B..., S, K, any width); the same dtype.
      dropout: which weights to drop.
      is_sown: whether the weights are stored.
      precision: as in `jax.lax`.
      others: other features that no kernel has, by name, and whether each is asked for.
      **masks: `bias`, `mask` and `is_causal`.

    Raises:
      ValueError: `implementation` insists on a kernel that lacks a feature that is asked for.
    """
    obstacles = {
        "dropout": dropout.is_on,
        "sown weights": is_sown,
        "a precision": precision is not None,
        **others,
    }
    return fused_kernel(
        implementation,
        query,
        key,
        value,
        reduction_dtype=reduction_dtype(),
        obstacles=obstacles,
        **masks,
    )


def without_weights(
    kernel: Attention | None,
    needs_weights: bool,
    query: Array,
    key: Array,
    value: Array,
    **options: Any,
) -> Array | None:
    """Computes attention by a kernel, or by XLA where the weights themselves are not needed.

    Else returns None.

    Args:
      kernel: the result of `kernel_of_call`.
      needs_weights: whether the weights are sown, dropped, or computed by a function of the user's.
      query: (B..., T, N, H).
      key: (B..., S, K, H), `value`: (B..., S, K, any width); the same dtype.
      **options: for `mpmodules.functions.attention.dot_product_attention`.

    Returns:
      (B..., T, N, width of `value`) in the values' dtype, or None.

    Raises:
      ValueError: shapes that do not fit.
    """
    attention.check_shapes(query, key, value)
    if kernel is not None:
        return kernel(query, key, value)
    if needs_weights:
        return None
    return attention.dot_product_attention(
        query, key, value, reduction_dtype=reduction_dtype(), **options
    )
