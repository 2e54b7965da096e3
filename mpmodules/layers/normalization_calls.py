"""Calls of normalizations, alike in both APIs: of arrays, with the region that they reduce over,
their statistics and their result; and of weights, in WeightNorm and SpectralNorm.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_tuple

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_flax
from mpmodules.functions.functional import broadcast_like, is_half, is_wider, mixing_allowed, widen
from mpmodules.functions.normalization import Region, normalize, shift_of
from policy.core.policy import Policy
from policy.functions.checkpointing import (
    as_stored,
    is_hashable,
    keeping_inputs,
    keeping_inputs_once,
)

Array = jax.Array


# --------------------------------------------------------------------------------------------------
# What a layer reduces over: methods of both apis' layers
# --------------------------------------------------------------------------------------------------


def layer_norm_region(layer: Any, x: Array) -> Region | None:
    """Returns the axes that a LayerNorm or an RMSNorm reduces over."""
    return Region(_axes(layer.reduction_axes, x))


def group_norm_region(layer: Any, x: Array) -> Region | None:
    """Returns the axes and groups of a GroupNorm; None where Flax rejects them."""
    last, channels = x.ndim - 1, x.shape[-1]
    axes = range(1, x.ndim) if layer.reduction_axes is None else _axes(layer.reduction_axes, x)
    groups = layer.num_groups
    if groups is None and layer.group_size:
        groups = channels // layer.group_size
    if not groups or groups < 0 or channels % groups or (axes and last not in axes):
        return None
    if layer.group_size not in (None, channels // groups):
        return None
    return Region(tuple(axis for axis in axes if axis != last), groups)


def instance_norm_region(layer: Any, x: Array) -> Region | None:
    """Returns the axes that an InstanceNorm reduces over: all but the batch's, which is the first,
    and the features'.

    Returns None where the first is one of the features', which Flax rejects.
    """
    features = _axes(layer.feature_axes, x)
    return None if 0 in features else Region(_others((0, *features), x))


def batch_norm_region(layer: Any, x: Array) -> Region | None:
    """Returns the axes that a BatchNorm reduces over: all but the features'."""
    return Region(_others(_axes(layer.axis, x), x))


def _axes(axes: int | Sequence[int], x: Array) -> tuple[int, ...]:
    """Returns `axes` of `x`, in rising order and none negative."""
    return tuple(sorted(set(normalize_axis_tuple(axes, x.ndim, allow_duplicate=True))))


def _others(axes: Sequence[int], x: Array) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


# --------------------------------------------------------------------------------------------------
# A call
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NormCall:
    """The arguments of a normalization's call.

    Attributes:
      x: any shape.
      region: the elements of `x` that share a mean.
      features: the axes of `x` along which the layer has scales and biases.
      mask: None, or broadcastable to `x`: False leaves an element out of the statistics.
      use_running_average: as given to a BatchNorm.
    """

    x: Array
    region: Region
    features: tuple[int, ...]
    mask: Array | None
    use_running_average: bool | None

    @property
    def shape(self) -> list[int]:
        """The shape of the scales and biases."""
        return [self.x.shape[axis] for axis in self.features]


def norm_call_of(layer: Any, call: MethodCall) -> NormCall | None:
    """Returns a call of a layer as one of a normalization.

    Returns None where Flax's own code is to run: of complex numbers, which no policy casts, of axes
    and masks that it rejects, and where an interceptor is around it.

    Raises:
      TypeError: the method does not take such arguments.
    """
    if not is_flax(call.method):
        return None
    given = inspect.signature(call.method).bind(layer, *call.args, **call.kwargs).arguments
    x = jnp.asarray(given["x"])
    if jnp.iscomplexobj(x) or not x.ndim:
        return None
    try:
        features = _axes(getattr(layer, "axis", getattr(layer, "feature_axes", -1)), x)
        region = layer._region(x)
    except np.exceptions.AxisError:
        return None
    mask = given.get("mask")
    if region is None or (region.groups and mask is not None and mask.shape[-1:] != x.shape[-1:]):
        return None
    return NormCall(x, region, features, mask, given.get("use_running_average"))


def statistics_dtype(reduction_dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of statistics: the wider of reduction_dtype and float32."""
    return jnp.dtype(reduction_dtype if is_wider(reduction_dtype, jnp.float32) else jnp.float32)


# --------------------------------------------------------------------------------------------------
# Its result
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Norm:
    """The static parameters of a normalization.

    Attributes:
      region: the elements that share a mean.
      epsilon: added to the variance.
      wide: the dtype of the statistics.
      dtype: of the result.
      takes_statistics: of its input; else it normalizes by running ones.
      takes_mean: subtracts the mean.
      fast: whether the variance is E[x^2] - E[x]^2, in one pass. None is True for numbers that can
        be shifted, so that it does not cancel.
      axis_name, axis_index_groups: of devices that share a mean, as in `jax.lax.pmean`.
    """

    region: Region
    epsilon: Any
    wide: np.dtype
    dtype: np.dtype
    takes_statistics: bool
    takes_mean: bool
    fast: bool | None
    axis_name: Any
    axis_index_groups: Any

    def is_exact_for(self, x: Array) -> bool:
        """Returns whether the statistics of `x` are exact, in one pass.

        See `mpmodules.functions.normalization`.
        """
        chooses = self.fast is None and self.takes_statistics and self.takes_mean
        is_narrow = is_half(x.dtype) and self.wide == jnp.float32
        return chooses and is_narrow and bool(x.size) and is_hashable(self.epsilon)


def normalized(
    layer: Any,
    call: NormCall,
    scale: Array | None,
    bias: Array | None,
    running: Sequence[Array],
    *,
    policy: Policy | None,
    dtype: DTypeLike,
    fast: bool | None,
    axis_name: Any,
    takes_statistics: bool,
) -> tuple[Array, list[Array]]:
    """Computes (x - mean) / sqrt(variance + epsilon) * scale + bias, rounded once.

    Under a policy backward keeps a half input as it came, and recomputes the rest.

    Args:
      layer: its other options are read.
      call: of the layer.
      scale, bias: as they are stored, along the features' axes; or None.
      running: a BatchNorm's running mean and variance, as they are stored; or nothing.
      dtype: of the result.
      fast, axis_name, takes_statistics: see `Norm`.

    Returns:
      The result, and the running statistics after the call.
    """
    x, mask, groups = call.x, call.mask, getattr(layer, "axis_index_groups", None)
    if fast is None and (mask is not None or axis_name is not None):
        fast = False
    norm = Norm(
        region=call.region,
        epsilon=layer.epsilon,
        wide=statistics_dtype(jnp.float32 if policy is None else policy.reduction_dtype),
        dtype=jnp.dtype(dtype),
        takes_statistics=takes_statistics,
        takes_mean=layer._takes_mean,
        fast=fast,
        axis_name=axis_name,
        axis_index_groups=None if groups is None else tuple(map(tuple, groups)),
    )
    shape = tuple(size if axis in call.features else 1 for axis, size in enumerate(x.shape))
    scale, bias, before = jax.tree.map(
        lambda p: jnp.asarray(p, norm.wide).reshape(shape), (scale, bias, tuple(running))
    )
    if norm.is_exact_for(x):
        region, epsilon = norm.region, norm.epsilon
        found = normalize(x, scale, bias, region=region, epsilon=epsilon, dtype=norm.dtype)
    else:
        found = _checkpointed(norm, x, policy)(x, scale, bias, mask, before)
    if not takes_statistics:
        return found[0], list(running)
    return found[0], [
        _averaged(layer.momentum, old, batch, mask)
        for old, batch in zip(running, found[1:], strict=False)
    ]


def _averaged(momentum: Any, running: Array, batch: Array, mask: Array | None) -> Array:
    """Updates a running statistic with a batch's, in the wider dtype of the two.

    Where a mask left out all of a feature, `batch` is `running` and stays as it is.
    """
    running = widen(running, batch.dtype)
    batch = widen(batch.reshape(running.shape), running.dtype)
    updated = momentum * running + (1 - momentum) * batch
    return updated if mask is None else jnp.where(batch == running, running, updated)


def _checkpointed(norm: Norm, x: Array, policy: Policy | None) -> Callable[..., Any]:
    """Returns the function of a norm's arrays.

    Where float32 would be wider, backward keeps its input and recomputes float32 values from it; a
    float32 input under a half-precision policy is one more array, of three.
    """
    run = functools.partial(_normalized, norm)
    if policy is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return run
    if not (is_half(policy.compute_dtype) or is_wider(policy.reduction_dtype, x.dtype)):
        return run
    return keeping_inputs_once(_normalized, norm) if is_hashable(norm) else keeping_inputs(run)


def _normalized(
    norm: Norm,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    running: Sequence[Array],
) -> tuple[Array, Array, Array]:
    x, shift = as_stored(x).astype(norm.wide), None
    if norm.takes_statistics:
        shift = shift_of(norm.region, x) if norm.fast is None and norm.takes_mean else None
        x = x if shift is None else x - shift
        mean, variance = _statistics(norm, x, mask, running, norm.fast or shift is not None)
    else:
        mean, variance = running
    factor = lax.rsqrt(variance + jnp.asarray(norm.epsilon, norm.wide))
    factor = factor if scale is None else factor * scale
    y = (x - mean) * factor
    y = y if bias is None else y + bias
    return y.astype(norm.dtype), mean if shift is None else mean + shift, variance


def _statistics(
    norm: Norm, x: Array, mask: Array | None, running: Sequence[Array], fast: bool
) -> tuple[Array, Array]:
    """Returns the mean and the variance of the elements that a mask keeps, over all devices.

    Where it keeps none, both are the running ones, or NaN.
    """
    kept = number = None
    if mask is not None:
        kept = broadcast_like(jnp.asarray(mask, bool), x)
        number = _everywhere(norm, norm.region.sum(kept.astype(x.dtype)))
    means = functools.partial(_means, norm, kept, number)
    if not norm.takes_mean:
        (variance,) = means(jnp.square(x))
        mean = jnp.zeros_like(variance)
    elif fast:
        mean, square = means(x, jnp.square(x))
        variance = jnp.maximum(square - jnp.square(mean), 0)
    else:
        (mean,) = means(x)
        (variance,) = means(jnp.square(x - mean))
    if number is None:
        return mean, variance
    instead = running or [jnp.asarray(jnp.nan, x.dtype)] * 2
    is_known = number > 0
    return jnp.where(is_known, mean, instead[0]), jnp.where(is_known, variance, instead[1])


def _means(norm: Norm, kept: Array | None, number: Array | None, *values: Array) -> Sequence[Array]:
    """Returns the means over all devices of the elements `kept`; `number` is their mean number."""
    if kept is None:
        local = [norm.region.mean(x) for x in values]
    else:
        local = [norm.region.sum(jnp.where(kept, x, 0)) for x in values]
    if norm.axis_name is not None:
        local = list(_everywhere(norm, jnp.stack(local)))  # one collective
    return local if number is None else [x / jnp.where(number > 0, number, 1) for x in local]


def _everywhere(norm: Norm, local: Array) -> Array:
    """Returns the mean over the devices."""
    if norm.axis_name is None:
        return local
    return lax.pmean(local, norm.axis_name, axis_index_groups=norm.axis_index_groups)


# --------------------------------------------------------------------------------------------------
# Norms of weights
# --------------------------------------------------------------------------------------------------


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
    normalized = _unit(weights, epsilon, tuple(reduced))
    if scale is None:
        return normalized
    shape = [size if axis in features else 1 for axis, size in enumerate(weights.shape)]
    return normalized * widen(scale, weights.dtype).reshape(shape)


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


def is_normalized_by_spectrum(layer: Any, weights: Array, what: str) -> bool:
    """Returns whether a SpectralNorm divides such weights: matrices, and arrays of more axes.

    Raises:
      ValueError: weights of more axes are to be rejected.
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
