"""Helpers of both wings' normalisations: their reduction axes, and a call taken apart so that JAX
traces it once.
"""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from mpmodules.calls.defined_in import is_flax
from mpmodules.functions.functional import broadcast_like, is_half, is_wider
from mpmodules.functions.moments import Region
from mpmodules.functions.normalization import normalize
from mpmodules.functions.promotion import mixing_allowed
from policy.core.policy import Policy

# Fields of a layer that differ from layer to layer, and are of no use once its variables are there.
UNUSED = frozenset(("scale_init", "bias_init", "rngs", "parent", "name"))


# --------------------------------------------------------------------------------------------------
# What a layer reduces over: methods of both wings' layers
# --------------------------------------------------------------------------------------------------


def no_region(layer: Any, x: jax.Array) -> Region | None:
    """Returns None, for a layer that takes no mean."""
    return None


def layer_norm_region(layer: Any, x: jax.Array) -> Region | None:
    """Returns the axes that a LayerNorm reduces over.

    Returns None where Flax refuses them, or those of its features.
    """
    axes = _listed(layer.reduction_axes)
    return (
        Region.of(axes, x.ndim)
        if _are_axes((*axes, *_listed(layer.feature_axes)), x.ndim)
        else None
    )


def group_norm_region(layer: Any, x: jax.Array) -> Region | None:
    """Returns the axes and groups of a GroupNorm; None where Flax refuses them."""
    if not x.ndim:
        return None
    size, channels = getattr(layer, "group_size", None), x.shape[-1]
    groups = layer.num_groups if size is None else channels // max(size, 1)
    if not groups or groups < 0 or channels % groups:
        return None
    axes = range(1, x.ndim) if layer.reduction_axes is None else _listed(layer.reduction_axes)
    if not _are_axes(axes, x.ndim) or (axes and x.ndim - 1 not in _without(axes, x.ndim, ())):
        return None
    return Region.of(_without(axes, x.ndim, x.ndim - 1), x.ndim, groups)


def instance_norm_region(layer: Any, x: jax.Array) -> Region | None:
    """Returns the axes that an InstanceNorm reduces over, or None where Flax refuses them.

    Those are all but the batch's, which is the first and can't be one of the features', and the
    features'.
    """
    features = _listed(layer.feature_axes)
    if not _are_axes(features, x.ndim) or any(axis % x.ndim == 0 for axis in features):
        return None
    return Region.of(_without(range(1, x.ndim), x.ndim, features), x.ndim)


def batch_norm_region(layer: Any, x: jax.Array) -> Region | None:
    """Returns the axes that a BatchNorm reduces over, all but the features'.

    Returns None where Flax refuses them.
    """
    features = _listed(layer.axis)
    return (
        Region.of(_without(range(x.ndim), x.ndim, features), x.ndim)
        if _are_axes(features, x.ndim)
        else None
    )


def _listed(axes: int | Sequence[int]) -> list[int]:
    return [int(axis) for axis in np.atleast_1d(np.asarray(axes))]


def _are_axes(axes: Iterable[int], ndim: int) -> bool:
    """Returns whether an array of `ndim` axes, which are to be one or more, has all of `axes`."""
    return ndim > 0 and all(-ndim <= axis < ndim for axis in axes)


def _without(axes: Iterable[int], ndim: int, left_out: int | Sequence[int]) -> list[int]:
    """Returns `axes` of an array of `ndim` axes without those `left_out`.

    Negative ones count from the end.
    """
    out = {axis % ndim for axis in _listed(left_out)}
    return [axis % ndim for axis in axes if axis % ndim not in out]


def feature_axes(layer: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes along which a normalisation has scales and biases."""
    axes = layer.axis if hasattr(layer, "axis") else getattr(layer, "feature_axes", -1)
    return tuple(sorted({axis % ndim for axis in _listed(axes)}))


# --------------------------------------------------------------------------------------------------
# A call in closed form
# --------------------------------------------------------------------------------------------------


def takes_exact_moments(
    layer: Any,
    method: Callable[..., Any],
    x: jax.Array,
    args: Sequence[Any],
    rest: Iterable[str],
    policy: Policy,
) -> bool:
    """Returns whether a normalisation of `x` under a policy can have exact statistics, and float32
    for the rest.

    A user's method, and arguments that Flax refuses, are left to Flax's code. So is an epsilon that
    is an array: it may be traced, differentiated, or one of many.

    Args:
      args, rest: the arguments of the call beside `x`.
    """
    if not is_flax(method) or not isinstance(layer.epsilon, numbers.Real):
        return False
    flags = ["use_running_average"] if layer._running else []
    takes_arguments = len(args) <= len(flags) and not set(rest) - {"mask", *flags[len(args) :]}
    return (
        takes_arguments
        and bool(x.size)
        and is_half(x.dtype)
        and policy.reduction_dtype == jnp.float32
    )


def saves_input(x: jax.Array, policy: Policy) -> bool:
    """Returns whether backward keeps the input of a normalisation, and recomputes float32 values
    from it: a float32 input under a half-precision policy is one more array, of three.
    """
    narrows = is_half(policy.compute_dtype) or is_wider(policy.reduction_dtype, x.dtype)
    return narrows and jnp.issubdtype(x.dtype, jnp.floating)


def normalized(
    layer: Any, x: jax.Array, region: Region, scale: Any, bias: Any, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a layer's result for `x`, and the mean and the variance of its region.

    Args:
      scale, bias: as they are stored, along the layer's feature axes; or None.
      dtype: of the result.
    """
    features = feature_axes(layer, x.ndim)
    shape = [size if axis in features else 1 for axis, size in enumerate(x.shape)]
    scale, bias = (
        None if p is None else jnp.asarray(p, jnp.float32).reshape(shape) for p in (scale, bias)
    )
    return normalize(x, scale, bias, region=region, epsilon=layer.epsilon, dtype=dtype)


def averaged(layer: Any, running: jax.Array, batch: jax.Array) -> jax.Array:
    """Updates a BatchNorm's running statistic with a batch's, in the wider dtype of the two."""
    with mixing_allowed():
        return layer.momentum * running + (1 - layer.momentum) * batch.reshape(running.shape)


# --------------------------------------------------------------------------------------------------
# A BatchNorm without elements to take statistics of
# --------------------------------------------------------------------------------------------------


def has_no_statistics(
    layer: Any, method: Callable[..., Any], x: Any, args: Sequence[Any], rest: Any
) -> bool:
    """Returns whether a call is to update a layer's running statistics with those of an empty
    array.

    Args:
      args, rest: the arguments of the call beside `x`.
    """
    takes = (
        layer._running
        and is_flax(method)
        and layer._takes_statistics(running_average_flag(args, rest))
    )
    return bool(takes) and getattr(x, "size", None) == 0


def running_average_flag(args: Sequence[Any], rest: Mapping[str, Any]) -> bool | None:
    """Returns the argument `use_running_average` of a call."""
    return args[0] if args else rest.get("use_running_average")


def by_running_average(
    args: Sequence[Any], rest: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, beside its input, for one that normalises by the running
    statistics.
    """
    return (True, *args[1:]) if args else (), dict(rest) if args else {
        **rest,
        "use_running_average": True,
    }


def masked_statistics(
    layer: Any, x: jax.Array, mask: Any, axes: Sequence[int], running: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Computes a BatchNorm's statistics of the elements that a mask keeps.

    Devices of the layer's axis name that have no such element are left out, and the others count
    alike, as in Flax. Promotes dtypes, so that it runs under standard promotion.

    Args:
      layer: its options say how.
      x: in reduction_dtype.
      mask: of booleans, broadcastable to `x`.
      axes: of `x`, reduced over.
      running: the mean and the variance before the call.

    Returns:
      The mean and the variance to normalise by, and the running ones after the call. Both are the
      running ones before it, for features of which no element is kept.
    """
    x, mask = x.astype(jnp.promote_types(x.dtype, jnp.float32)), jnp.asarray(mask, bool)
    count = jnp.sum(broadcast_like(mask, x), axes, dtype=x.dtype)
    present = count > 0
    share = present.astype(x.dtype)  # of the devices that have an element
    if layer.axis_name is not None:
        share = lax.pmean(share, layer.axis_name, axis_index_groups=layer.axis_index_groups)

    def mean(values: jax.Array) -> jax.Array:
        local = jnp.sum(values, axes, where=mask) / jnp.maximum(count, 1)
        if layer.axis_name is None:
            return local
        everywhere = lax.pmean(local, layer.axis_name, axis_index_groups=layer.axis_index_groups)
        return everywhere / jnp.where(share > 0, share, 1)

    centre = mean(x)
    if layer.use_fast_variance:
        variance = jnp.maximum(mean(jnp.square(x)) - jnp.square(centre), 0)
    else:
        variance = mean(jnp.square(x - jnp.expand_dims(centre, tuple(axes))))
    found = {"mean": centre, "var": variance}
    updated = {
        n: jnp.where(share > 0, averaged(layer, running[n], found[n]), running[n]) for n in found
    }
    return {n: jnp.where(share > 0, found[n], running[n]) for n in found}, updated


# --------------------------------------------------------------------------------------------------
# A call of Flax's code
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NormalizationCall(abc.ABC):
    """A call of a normalisation by Flax's code, as a function of layer and input.

    Each wing implements it.

    Attributes:
      method: Flax's.
      output_dtype: of the result.
      shifts: whether the variance may be taken in one pass over shifted data.
      args, rest: the other arguments of the call.
    """

    method: Callable[..., Any]
    policy: Policy
    output_dtype: DTypeLike
    shifts: bool
    args: tuple[Any, ...]
    rest: tuple[tuple[str, Any], ...]

    def is_of(self, layer: Any, module: str) -> bool:
        """Returns whether Flax's own method is called on a class of `module`, with only flags
        beside its input.
        """
        flags = (*self.args, *(value for _, value in self.rest))
        is_own = type(layer).__module__ == module and is_flax(self.method)
        return (
            is_own
            and all(flag is None or isinstance(flag, bool) for flag in flags)
            and not self.is_masked(layer)
        )

    def is_masked(self, layer: Any) -> bool:
        """Returns whether Flax's own BatchNorm is to take statistics of the elements that a mask
        keeps.
        """
        rest = dict(self.rest)
        takes = layer._running and layer._takes_statistics(running_average_flag(self.args, rest))
        return bool(takes) and rest.get("mask") is not None and is_flax(self.method)

    @abc.abstractmethod
    def __call__(self, layer: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result, and the values of the running statistics after the call."""


def frozen(fields: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Hashable], ...] | None:
    """Returns the fields that determine a layer's program, hashable.

    Returns None where one of them is not.
    """
    found = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in fields if n not in UNUSED)
    try:
        hash(found)
    except TypeError:
        return None
    return found
