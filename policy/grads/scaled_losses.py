"""Losses that were scaled by hand, and gradients of them that reach an optimizer still scaled.

A plain tree of gradients carries no scale, so no type tells a scaled one. What can be told, while a step is traced, is
that `loss_scale.scale(loss)` ran and `loss_scale.unscale` did not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from policy.precedence import warn_once


class _Pending(threading.local):
    """The scales of this thread by which a traced loss was multiplied, and nothing divided since."""

    def __init__(self) -> None:
        self.scales: dict[Hashable, weakref.ref[Any] | None] = {}


_pending = _Pending()
_ABSENT: Any = object()


def note_scaled(tree: Any, scale: Any) -> None:
    """Notes that a loss under differentiation was scaled: a tree of one floating scalar that is traced."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and isinstance(leaves[0], Tracer) and _is_loss(leaves[0]):
        key, scales = _key(scale), _pending.scales
        scales[key] = None if _is_number(scale) else weakref.ref(scale, lambda _: scales.pop(key, None))


def note_unscaled() -> None:
    """Notes that something was unscaled: by which scale doesn't matter, as jit gives one scale several tracers."""
    _pending.scales.clear()


def warn_if_scaled(scale: Any) -> None:
    """Warns where a loss was multiplied by `scale`, the optimizer's own, and nothing was unscaled since."""
    if _pending.scales.pop(_key(scale), _ABSENT) is not _ABSENT:
        warn_once(
            "loss_scale.scale(loss) was differentiated, and its gradients reached mixed_precision without "
            "loss_scale.unscale: a plain tree counts as true gradients, so that each step is too long by the loss "
            "scale. Differentiate with policy.value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state)), which "
            "takes the unscaled loss, or call loss_scale.unscale(grads) first."
        )


def _key(scale: Any) -> Hashable:
    return float(scale) if _is_number(scale) else id(scale)


def _is_loss(x: jax.Array) -> bool:
    return not x.ndim and jnp.issubdtype(x.dtype, jnp.floating)


def _is_number(scale: Any) -> bool:
    return isinstance(scale, (int, float, np.generic))  # which take no weak reference
