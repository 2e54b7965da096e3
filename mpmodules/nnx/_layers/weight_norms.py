"""WeightNorm and SpectralNorm: norms of weights in reduction_dtype.

Stored weights keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.module import first_from

from mpmodules.functions import functional
from mpmodules.layers import weight_norms as norms
from mpmodules.nnx._layer import BuiltWithDtypes
from policy.core.arrays import cast_array
from policy.core.policy import Policy
from policy.core.scope import Source, reduction_dtype_of


class ReparameterizedWeights(BuiltWithDtypes):
    """Base class of both wrappers, which count as modules and normalise the weights of the layer
    inside in place.

    Flax overwrites those weights at each call. Here they are widened to reduction_dtype before
    their norm is taken. The layer inside gets them unrounded under a policy, and rounds them once,
    as it would any weight; with no policy it gets them in Flax's `dtype`. The stored weights are
    rounded to the dtype that they were stored in.
    """

    layer_instance: Any

    def _call_with(
        self,
        normalise: Callable[[Any, Any], jax.Array | None],
        state: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls the layer inside with normalised weights, and then rounds them to their stored
        dtypes.

        Args:
          normalise: takes a path and a variable of `state`; None where it is left as it is.
        """
        handed = []
        try:
            for path, variable in flax_nnx.to_flat_state(state):
                weights = variable.get_value()
                normalised = normalise(path, variable)
                if normalised is None:
                    continue
                if self.dtype_policy is None:  # what Flax hands on
                    normalised = cast_array(normalised, norms.inferred_dtype(self, weights))
                variable.set_value(normalised)
                handed.append((variable, weights.dtype))
            return self.layer_instance(*args, **kwargs)
        finally:
            for variable, dtype in handed:
                variable.set_value(cast_array(variable.get_value(), dtype))

    def _reduces(self, *arrays: Any) -> np.dtype:
        """Returns the dtype in which the norm of `arrays` is taken."""
        wide = jnp.dtype(reduction_dtype_of(*arrays))
        policy = self.dtype_policy
        if policy is None or functional.is_wider(wide, policy.reduction_dtype):
            return wide
        return policy.reduction_dtype


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

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer inside with normalised weights.

        Args:
          x: the first argument of the layer inside.
          *args: its other arguments.
          **kwargs: those that it takes by name.
        """
        state = flax_nnx.state(self.layer_instance)
        return self._call_with(self._normalised, state, x, *args, **kwargs)

    def _normalised(self, path: Any, variable: Any) -> jax.Array | None:
        weights, scale = variable.get_value(), None
        is_floating = jnp.issubdtype(getattr(weights, "dtype", np.int32), jnp.inexact)
        if not self.variable_filter(path, variable) or not is_floating:
            return None
        if self.use_scale:
            if self.scales is None or path not in self.scales:
                raise RuntimeError(
                    f"There is no scale of the parameter {path}: the parameters of layer_instance "
                    "should not change after WeightNorm is made."
                )
            scale = self.scales[path][...]
        features = norms.feature_axes(self.feature_axes, weights)
        wide = functional.widen(weights, self._reduces(weights))
        return norms.weight_norm(wide, scale, features=features, epsilon=self.epsilon)


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

    def __call__(self, x: Any, update_stats: bool | None = None) -> Any:
        """Calls the layer inside with normalised weights."""
        updates = first_from(
            update_stats,
            not self.use_running_average,
            error_msg="No `update_stats` was given to SpectralNorm, neither to its constructor nor "
            "to its call.",
        )
        normalise = lambda path, variable: self._normalised(path, variable, updates)  # noqa: E731
        return self._call_with(normalise, flax_nnx.state(self.layer_instance, flax_nnx.Param), x)

    def _normalised(self, path: Any, variable: Any, updates: bool) -> jax.Array | None:
        weights = variable.get_value()
        if not norms.is_normalised_by_spectrum(self, weights, "Layer instance parameter"):
            return None
        if (*path, "u") not in self.batch_stats:
            raise RuntimeError(
                f"There are no statistics of the parameter {path}: the parameters of "
                "layer_instance should not change after SpectralNorm is made."
            )
        u, sigma = (self.batch_stats[*path, name] for name in ("u", "sigma"))
        for statistic in (u, sigma):  # of a model that was built without us
            self._widen_statistic(statistic)
        wide = functional.widen(weights, self._reduces(weights))
        normalised, new_u, new_sigma = norms.spectral_norm(
            wide, u.get_value(), steps=self.n_steps, epsilon=self.epsilon
        )
        if updates:
            u.set_value(new_u)
            sigma.set_value(new_sigma)
        return normalised
