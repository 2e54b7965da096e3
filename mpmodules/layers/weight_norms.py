"""Norms of weights, which both wings' WeightNorm and SpectralNorm share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_tuple

from mpmodules.functions.functional import widen
from mpmodules.functions.promotion import mixing_allowed

Array = jax.Array


def feature_axes(axes: int | Sequence[int] | None, weights: Array) -> tuple[int, ...]:
    """Returns the axes along which weights have scales, in rising order; None is no axis."""
    return tuple(sorted(normalize_axis_tuple(() if axes is None else axes, weights.ndim)))


def weight_norm(
    weights: Array, scale: Array | None, *, features: Sequence[int], epsilon: float
) -> Array:
    """Computes weights / |weights| * scale in the weights' dtype.

    Args:
      weights: any shape; the norm is over all axes but `features`.
      scale: along `features`, or None.
      epsilon: added to the squared norm.
    """
    reduced = [axis for axis in range(weights.ndim) if axis not in features]
    normalised = _unit(weights, epsilon, tuple(reduced))
    if scale is None:
        return normalised
    shape = [size if axis in features else 1 for axis, size in enumerate(weights.shape)]
    return normalised * widen(scale, weights.dtype).reshape(shape)


def spectral_norm(
    weights: Array, u: Array, *, steps: int, epsilon: float
) -> tuple[Array, Array, Array]:
    """Divides weights by their largest singular value, by power iteration in the weights' dtype.

    Args:
      weights: (..., d); all axes but the last are one of a matrix.
      u: (1, d), where the iteration starts.
      steps: of the iteration.
      epsilon: added to squared norms.

    Returns:
      The divided weights; `u` after the iteration; and the singular value.
    """
    matrix, u = weights.reshape(-1, weights.shape[-1]), widen(u, weights.dtype)
    v = u
    for _ in range(steps):
        v = _unit(jnp.matmul(u, matrix.T), epsilon)
        u = _unit(jnp.matmul(v, matrix), epsilon)
    u, v = lax.stop_gradient(u), lax.stop_gradient(v)
    sigma = jnp.matmul(jnp.matmul(v, matrix), u.T)[0, 0]
    return (matrix / jnp.where(sigma != 0, sigma, 1)).reshape(weights.shape), u, sigma


def is_normalised_by_spectrum(layer: Any, weights: Array, what: str) -> bool:
    """Returns whether a SpectralNorm divides such weights: matrices, and arrays of more axes.

    Raises:
      ValueError: weights of more axes are to be refused.
    """
    if weights.ndim > 2 and layer.n_steps >= 1 and layer.error_on_non_matrix:
        raise ValueError(f"{what} is {weights.ndim}D but error_on_non_matrix is True")
    is_floating = jnp.issubdtype(weights.dtype, jnp.inexact)
    return weights.ndim > 1 and layer.n_steps >= 1 and is_floating


def inferred_dtype(layer: Any, weights: Array) -> np.dtype:
    """Returns the dtype that the layer inside gets its weights in where no policy holds: Flax's
    `dtype`, or the one that weights and their norm's own parameters promote to.
    """
    if layer.dtype is not None:
        return jnp.dtype(layer.dtype)
    with mixing_allowed():
        own = layer.param_dtype if getattr(layer, "use_scale", True) else weights.dtype
        return jnp.result_type(weights.dtype, own)


def _unit(x: Array, epsilon: float, axes: tuple[int, ...] | None = None) -> Array:
    """Divides by the norm over `axes`, or over all."""
    return x * lax.rsqrt((x * x).sum(axes, keepdims=True) + epsilon)
