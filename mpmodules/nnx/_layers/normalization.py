"""The normalizations: statistics, scale and bias in reduction_dtype, one rounding at the end; and
those of weights, WeightNorm and SpectralNorm, which keep stored weights in their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.module import first_from
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.functions.functional import is_half, is_wider, mixing_allowed, widen
from mpmodules.functions.normalization import Region
from mpmodules.layers import normalization_calls as norms
from mpmodules.nnx._layer import BuiltWithDtypes, Layer
from mpmodules.nnx._resolution import in_complex
from policy.core.arrays import cast_array
from policy.core.policy import Policy
from policy.core.scope import Source, reduction_dtype_of


class Normalization(Layer):
    """Base class of the normalizations.

    Input, scale, bias and running statistics are widened to reduction_dtype before anything is
    computed, and the result is rounded once. Where the layer is a boundary, nothing is rounded on
    the way in. The residuals of a half input are that input and the statistics, no float32 copy.

    Without `use_fast_variance`, Flax's one-pass E[x^2] - E[x]^2 runs where no policy holds, and
    under a policy a variance that does not cancel: of half inputs exact sums in one pass
    (`mpmodules.functions.normalization`), of others one pass over data shifted by a few of its
    elements, and two passes where there is a mask or an axis name. A value given by the user is
    obeyed.

    Flax's own method runs without a policy, where nothing is half, and with a `promote_dtype` of
    the user's own.
    """

    axis_name: str | None
    scale: flax_nnx.Param | None
    use_fast_variance: bool

    _region: ClassVar[Callable[..., Region | None]] = norms.layer_norm_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    _takes_mean: ClassVar[bool] = True
    _chooses_variance = True  # False where the user gave use_fast_variance

    def _policy_arguments(
        self, upstream_init: Callable[..., None], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        if kwargs.get("use_fast_variance") is not None:
            self._chooses_variance = False
            return kwargs
        return {name: value for name, value in kwargs.items() if name != "use_fast_variance"}

    def _call_layer(self, call: MethodCall) -> Any:
        is_users, dtype = self.promote_dtype is not promote_dtype, call.returned_dtype
        norm = None if is_users else norms.norm_call_of(self, call)
        if norm is None:
            with mixing_allowed(not is_users):
                return call.run(in_complex(self, call) or self)
        if call.policy is not None:
            return self._normalized(norm, call.policy, dtype)
        stored = [v[...] for v in (*self._parameters(), *self._running()) if v is not None]
        with mixing_allowed():  # what Flax infers, asked for without computing anything
            dtype = canonicalize_dtype(norm.x, *stored, dtype=self.dtype)
        if any(is_half(d) for d in (dtype, norm.x.dtype, *(v.dtype for v in stored))):
            return self._normalized(norm, None, dtype)
        return call.run(self)

    def _normalized(
        self, call: norms.NormCall, policy: Policy | None, dtype: DTypeLike
    ) -> jax.Array:
        """Normalizes, and updates running statistics in the dtype that they are stored in."""
        scale, bias = (None if p is None else p[...] for p in self._parameters())
        running, takes_statistics = self._running(), self._takes_statistics(call)
        chooses = policy is not None and self._chooses_variance and self.use_fast_variance
        y, updated = norms.normalized(
            self,
            call,
            scale,
            bias,
            [variable[...] for variable in running],
            policy=policy,
            dtype=dtype,
            fast=None if chooses else self.use_fast_variance,
            axis_name=self.axis_name,
            takes_statistics=takes_statistics,
        )
        if takes_statistics:
            for variable, value in zip(running, updated, strict=True):
                variable[...] = jax.lax.stop_gradient(value).astype(variable[...].dtype)
        return y

    def _parameters(self) -> Sequence[flax_nnx.Param | None]:
        return self.scale, getattr(self, "bias", None)  # an RMSNorm has none

    def _running(self) -> Sequence[flax_nnx.Variable]:
        """Returns the running mean and variance, if the layer has them."""
        return ()

    def _takes_statistics(self, call: norms.NormCall) -> bool:
        """Returns whether a call takes statistics of its input."""
        return True


class LayerNorm(Normalization, flax_nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = nnx.LayerNorm(2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16))
      Array([[-1, 1]], dtype=bfloat16)
    """


class RMSNorm(Normalization, flax_nnx.RMSNorm):
    """`flax.nnx.RMSNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = nnx.RMSNorm(4, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.full((1, 4), 3.0, jnp.bfloat16))
      Array([[1, 1, 1, 1]], dtype=bfloat16)
    """

    _takes_mean = False


class GroupNorm(Normalization, flax_nnx.GroupNorm):
    """`flax.nnx.GroupNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([[1000.0, 1008.0, 8.0, 16.0]], jnp.bfloat16))
      Array([[-1, 1, -1, 1]], dtype=bfloat16)
    """

    def _region(self, x: jax.Array) -> Region | None:
        # Flax lays out the groups' statistics as if one axis were left beside the channels; others
        # are its to mix up.
        region = norms.group_norm_region(self, x)
        return region if region is not None and len(region.axes) == x.ndim - 2 else None


class InstanceNorm(Normalization, flax_nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Example:
      >>> layer = nnx.InstanceNorm(1, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([[[1000.0], [1008.0]]], jnp.bfloat16)).ravel()
      Array([-1, 1], dtype=bfloat16)
    """

    _region = norms.instance_norm_region


class BatchNorm(Normalization, flax_nnx.BatchNorm):
    """`flax.nnx.BatchNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Running statistics are stored in the wider of float32 and reduction_dtype, not in param_dtype.

    Under a policy, a batch without elements, or whose mask keeps none, is normalized by the running
    statistics, which stay as they are; devices of `axis_name` whose mask keeps none are left out.
    Without a policy they become NaN, as in Flax.

    Example:
      >>> layer = nnx.BatchNorm(1, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.asarray([[1000.0], [1008.0]], jnp.bfloat16))
      >>> y.ravel(), layer.mean[...].dtype
      (Array([-1, 1], dtype=bfloat16), dtype('float32'))
    """

    _region = norms.batch_norm_region

    def _running(self) -> Sequence[flax_nnx.Variable]:
        return self.mean, self.var

    def _takes_statistics(self, call: norms.NormCall) -> bool:
        flag = first_from(
            call.use_running_average,
            self.use_running_average,
            error_msg="No `use_running_average` was given to BatchNorm, neither to its constructor "
            "nor to its call nor by `nnx.view`.",
        )
        return not flag and call.x.size != 0

    def _capture(self, policy: Policy | None, source: Source) -> None:
        super()._capture(policy, source)
        if policy is not None:
            for statistic in self._running():
                statistic.set_value(widen(statistic[...], policy.reduction_dtype))


class ReparameterizedWeights(BuiltWithDtypes):
    """Base class of both wrappers, which count as modules and normalize the weights of the layer
    inside in place.

    Flax overwrites those weights at each call. Here they are widened to reduction_dtype before
    their norm is taken. The layer inside gets them unrounded under a policy, and rounds them once,
    as it would any weight; with no policy it gets them in Flax's `dtype`. The stored weights are
    rounded to the dtype that they were stored in.
    """

    layer_instance: Any

    def _call_with(
        self,
        normalize: Callable[[Any, Any], jax.Array | None],
        state: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls the layer inside with normalized weights, and then rounds them to their stored
        dtypes.

        Args:
          normalize: takes a path and a variable of `state`; None where it is left as it is.
        """
        handed = []
        try:
            for path, variable in flax_nnx.to_flat_state(state):
                weights = variable.get_value()
                normalized = normalize(path, variable)
                if normalized is None:
                    continue
                if self.dtype_policy is None:  # what Flax hands on
                    normalized = cast_array(normalized, norms.inferred_dtype(self, weights))
                variable.set_value(normalized)
                handed.append((variable, weights.dtype))
            return self.layer_instance(*args, **kwargs)
        finally:
            for variable, dtype in handed:
                variable.set_value(cast_array(variable.get_value(), dtype))

    def _reduces(self, *arrays: Any) -> np.dtype:
        """Returns the dtype in which the norm of `arrays` is taken."""
        wide = jnp.dtype(reduction_dtype_of(*arrays))
        policy = self.dtype_policy
        if policy is None or is_wider(wide, policy.reduction_dtype):
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
        """Calls the layer inside with normalized weights.

        Args:
          x: the first argument of the layer inside.
          *args: its other arguments.
          **kwargs: those that it takes by name.
        """
        state = flax_nnx.state(self.layer_instance)
        return self._call_with(self._normalized, state, x, *args, **kwargs)

    def _normalized(self, path: Any, variable: Any) -> jax.Array | None:
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
        wide = widen(weights, self._reduces(weights))
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
        """Calls the layer inside with normalized weights."""
        updates = first_from(
            update_stats,
            not self.use_running_average,
            error_msg="No `update_stats` was given to SpectralNorm, neither to its constructor nor "
            "to its call.",
        )
        normalize = lambda path, variable: self._normalized(path, variable, updates)  # noqa: E731
        return self._call_with(normalize, flax_nnx.state(self.layer_instance, flax_nnx.Param), x)

    def _normalized(self, path: Any, variable: Any, updates: bool) -> jax.Array | None:
        weights = variable.get_value()
        if not norms.is_normalized_by_spectrum(self, weights, "Layer instance parameter"):
            return None
        if (*path, "u") not in self.batch_stats:
            raise RuntimeError(
                f"There are no statistics of the parameter {path}: the parameters of "
                "layer_instance should not change after SpectralNorm is made."
            )
        u, sigma = (self.batch_stats[*path, name] for name in ("u", "sigma"))
        for statistic in (u, sigma):  # of a model that was built without us
            self._widen_statistic(statistic)
        wide = widen(weights, self._reduces(weights))
        normalized, new_u, new_sigma = norms.spectral_norm(
            wide, u.get_value(), steps=self.n_steps, epsilon=self.epsilon
        )
        if updates:
            u.set_value(new_u)
            sigma.set_value(new_sigma)
        return normalized
