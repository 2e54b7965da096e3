"""WeightNorm and SpectralNorm: norms of weights in reduction_dtype.

Stored weights keep their dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx as flax_nnx

from mpmodules.functions import functional
from mpmodules.functions.promotion import mixing_allowed
from mpmodules.nnx._layer import BuiltWithDtypes
from mpmodules.nnx._resolution import viewed
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.scope import Source
from policy.functions.widening import reduction_dtype_of


class ReparameterizedWeights(BuiltWithDtypes):
    """Base class of both wrappers, which count as modules and normalise the weights of the layer
    inside in place.

    Flax overwrites those weights at each call. Here they are widened to reduction_dtype before
    their norm is taken. The layer inside gets them unrounded under a policy, and rounds them once,
    as it would any weight; with no policy it gets them in Flax's `dtype`. The stored weights are
    rounded to the dtype that they were stored in.
    """

    _handed: list[tuple[Any, Any]] | None = (
        None  # while a call is under way: the weights, and their stored dtypes
    )

    def _run(self, upstream_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Flax's call, and then rounds the weights to their stored dtype."""
        handed: list[tuple[Any, Any]] = []
        try:
            return upstream_call(viewed(self, _handed=handed), *args, **kwargs)
        finally:
            for weights, stored in handed:
                weights.set_value(cast_array(weights.get_value(), stored))

    def _hand_on(self, weights: Any, normalised: Any) -> None:
        """Puts normalised weights in place for the call under way."""
        stored = weights.get_value().dtype
        dtype = normalised.dtype
        if (
            self.dtype_policy is None
        ):  # what Flax hands on: what weights and its own parameters have in common
            with mixing_allowed():
                inferred = jnp.result_type(
                    stored, self.param_dtype if getattr(self, "use_scale", True) else stored
                )
            dtype = inferred if self.dtype is None else self.dtype
        if self._handed is None:  # not in a call: what stays
            dtype = stored
        else:
            self._handed.append((weights, stored))
        weights.set_value(cast_array(normalised, dtype))

    def _reduces(self, *arrays: Any) -> Any:
        """Returns the dtype in which the norm of `arrays` is taken."""
        wide = reduction_dtype_of(*arrays)
        policy = self.dtype_policy
        return (
            wide
            if policy is None or functional.is_wider(wide, policy.reduction_dtype)
            else policy.reduction_dtype
        )


def _restoring(upstream_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Flax's call: the weights are then rounded to their stored dtype.

    Arguments differ by Flax's version.
    """

    @functools.wraps(upstream_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(upstream_call, *args, **kwargs)

    return call


class WeightNorm(ReparameterizedWeights, flax_nnx.WeightNorm):
    """`flax.nnx.WeightNorm` that obeys policies: norms in reduction_dtype, weights and scales kept
    in param_dtype.

    Example:
      >>> with use_policy("p=f32,c=bf16"):
      ...     layer = nnx.WeightNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    def _capture(self, policy: Policy | None, source: Source) -> None:
        super()._capture(policy, source)
        if policy is not None and self.scales:
            for path, scale in self.scales.items():
                if isinstance(scale, flax_nnx.Variable):
                    scale.set_value(cast_array(scale[...], policy.param_dtype))
                else:
                    self.scales[path] = cast_array(scale, policy.param_dtype)

    __call__ = _restoring(flax_nnx.WeightNorm.__call__)

    def _weightnorm_inplace(self, path: Any, param: Any) -> None:
        if not self.variable_filter(path, param) or not jnp.issubdtype(param.dtype, jnp.inexact):
            return super()._weightnorm_inplace(path, param)
        stored = param.get_value()
        wide = self._reduces(stored)
        weights = param.replace(functional.widen(stored, wide))
        scales = self.scales
        if scales is not None and path in scales:
            scales = {path: functional.widen(scales[path][...], wide)}
        view = viewed(self, dtype=wide, scales=scales)
        flax_nnx.WeightNorm._weightnorm_inplace(view, path, weights)
        self._hand_on(param, weights.get_value())


class SpectralNorm(ReparameterizedWeights, flax_nnx.SpectralNorm):
    """`flax.nnx.SpectralNorm` that obeys policies: the power iteration in reduction_dtype, weights
    in param_dtype.

    Its statistics `u` and `sigma` are stored in the wider of float32 and reduction_dtype, not in
    param_dtype.

    Example:
      >>> with use_policy("p=f32,c=bf16"):
      ...     layer = nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    def _capture(self, policy: Policy | None, source: Source) -> None:
        super()._capture(policy, source)
        for statistic in self.batch_stats.values():
            self._widen_statistic(statistic)

    def _widen_statistic(self, statistic: Any) -> None:
        value = statistic.get_value()
        wide = self._reduces(value)
        if value.dtype != wide:
            statistic.set_value(value.astype(wide))

    __call__ = _restoring(flax_nnx.SpectralNorm.__call__)

    def _spectral_normalize_inplace(self, path: Any, orig_param: Any, update_stats: bool) -> None:
        if not jnp.issubdtype(orig_param.dtype, jnp.inexact):
            return super()._spectral_normalize_inplace(path, orig_param, update_stats)
        stored = orig_param.get_value()
        wide = self._reduces(stored)
        for name in ("u", "sigma"):  # of a model that was built without us
            if (*path, name) in self.batch_stats:
                self._widen_statistic(self.batch_stats[*path, name])
        weights = orig_param.replace(functional.widen(stored, wide))
        flax_nnx.SpectralNorm._spectral_normalize_inplace(
            viewed(self, dtype=wide), path, weights, update_stats
        )
        self._hand_on(orig_param, weights.get_value())
