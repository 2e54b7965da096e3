"""Detects losses scaled by hand whose gradients reach an optimizer unscaled.

A plain tree of gradients carries no scale, so no type shows that it is scaled. While a step is
traced, though, it can be recorded that `loss_scale.scale(loss)` ran and `loss_scale.unscale` did
not.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from policy.core.messages import warn_once
from policy.programs.thread import thread

_ABSENT: Any = object()


def note_scaled(tree: Any, scale: Any) -> None:
    """Records that a loss under differentiation (one traced floating scalar) was scaled."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and isinstance(leaves[0], Tracer) and _is_loss(leaves[0]):
        key, scales = _key(scale), thread.scaled_losses
        scales[key] = (
            None if _is_number(scale) else weakref.ref(scale, lambda _: scales.pop(key, None))
        )


def note_unscaled() -> None:
    """Records that something was unscaled.

    The scale doesn't matter, because jit gives one scale several tracers.
    """
    thread.scaled_losses.clear()


def warn_if_scaled(scale: Any) -> bool:
    """Warns if a loss was multiplied by the optimizer's `scale` without an unscaling since.

    Returns whether it was.
    """
    is_scaled = thread.scaled_losses.pop(_key(scale), _ABSENT) is not _ABSENT
    if is_scaled:
        warn_once(
            "loss_scale.scale(loss) was differentiated, and its gradients reached mixed_precision "
            "without loss_scale.unscale. A plain tree counts as unscaled gradients, so each step "
            "is too large by the factor of the loss scale. Differentiate with "
            "policy.value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state)), which takes the "
            "unscaled loss, or call loss_scale.unscale(grads) first."
        )
    return is_scaled


def _key(scale: Any) -> Hashable:
    return float(scale) if _is_number(scale) else id(scale)


def _is_loss(x: jax.Array) -> bool:
    return not x.ndim and jnp.issubdtype(x.dtype, jnp.floating)


def _is_number(scale: Any) -> bool:
    return isinstance(scale, (int, float, np.generic))  # which take no weak reference
