"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.module import merge_param
from jax.typing import DTypeLike

from mpmodules.calls.boundary import LayerCall
from mpmodules.functions.moments import Region
from mpmodules.functions.promotion import mixing_allowed
from mpmodules.layers.normalization_calls import (
    NormCall,
    batch_norm_region,
    group_norm_region,
    instance_norm_region,
    layer_norm_region,
    norm_call_of,
    normalized,
    statistics_dtype,
)
from mpmodules.linen._layer import Layer, declared_field, half_safe_fields
from mpmodules.linen._resolution import dtype_fields, fields_set
from policy.core.arrays import cast_array
from policy.core.policy import Policy


class Normalization(Layer):
    """Base class of the normalisations.

    The input is widened to reduction_dtype before the statistics, scale and bias are read in
    reduction_dtype, and the result is rounded once. Where the layer is a boundary, nothing is
    rounded on the way in. The residuals of a half input are that input and the statistics, no
    float32 copy.

    `use_fast_variance` is None by default: with no policy in force that is Flax's one-pass E[x^2] -
    E[x]^2, under a policy a variance that does not cancel: of half inputs exact sums in one pass
    (`mpmodules.functions.moments`), of others one pass over data shifted by a few of its elements,
    and two passes where there is a mask or an axis name. A value given by the user is obeyed.

    Without a policy Flax's own method runs, and with one where an interceptor is around it.
    """

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

    _region: ClassVar[Callable[..., Region | None]] = layer_norm_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    _takes_mean: ClassVar[bool] = True

    def _policy_fields(self, policy: Policy | None) -> dict[str, Any]:
        fast = declared_field(self, "use_fast_variance")
        fields = dtype_fields(self, policy)
        fields["use_fast_variance"] = policy is None if fast is None else fast
        return fields if policy is None else fields | {"dtype": policy.reduction_dtype}

    def _call_layer(self, call: LayerCall) -> Any:
        policy, dtype = call.policy, call.returned_dtype
        if call.effective.dtype is not None:  # an explicit complex one
            policy = None
        norm = None if policy is None else norm_call_of(self, call)
        if policy is not None and norm is not None:
            fields = dtype_fields(self, policy) | half_safe_fields(self, policy.param_dtype)
            with fields_set(self, fields):
                return self._normalised(norm, policy, dtype)
        with mixing_allowed():  # Flax asks how float64 promotes
            y = super()._call_layer(call)
        return y if policy is None else cast_array(y, dtype)

    def _normalised(self, call: NormCall, policy: Policy, dtype: DTypeLike) -> jax.Array:
        """Normalises, with parameters and running statistics that are created or read as Flax's."""
        running = self._running(call, policy)
        takes_statistics = self._takes_statistics(call)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, call.shape, self.param_dtype)
        if getattr(self, "use_bias", False):
            bias = self.param("bias", self.bias_init, call.shape, self.param_dtype)
        y, updated = normalized(
            self,
            call,
            scale,
            bias,
            [variable.value for variable in running],
            policy=policy,
            dtype=dtype,
            fast=declared_field(self, "use_fast_variance"),
            axis_name=None if running and self.is_initializing() else self.axis_name,
            takes_statistics=takes_statistics,
        )
        if takes_statistics and not self.is_initializing():
            for variable, value in zip(running, updated, strict=True):
                variable.value = value
        return y

    def _running(self, call: NormCall, policy: Policy) -> Sequence[flax_nn.Variable]:
        """Returns the variables of the running mean and variance, if the layer has them."""
        return ()

    def _takes_statistics(self, call: NormCall) -> bool:
        """Returns whether a call takes statistics of its input."""
        return True


class LayerNorm(Normalization, flax_nn.LayerNorm):
    """`flax.linen.LayerNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Example:
      >>> layer = linen.LayerNorm(dtype_policy="p=f32,c=bf16")
      >>> x = jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y
      Array([[-1, 1]], dtype=bfloat16)
    """


class RMSNorm(Normalization, flax_nn.RMSNorm):
    """`flax.linen.RMSNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = linen.RMSNorm(dtype_policy="p=f32,c=bf16")
      >>> x = jnp.full((1, 4), 3.0, jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y
      Array([[1, 1, 1, 1]], dtype=bfloat16)
    """

    _takes_mean: ClassVar[bool] = False


class GroupNorm(Normalization, flax_nn.GroupNorm):
    """`flax.linen.GroupNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Example:
      >>> layer = linen.GroupNorm(num_groups=2, dtype_policy="p=f32,c=bf16")
      >>> x = jnp.asarray([[1000.0, 1008.0, 8.0, 16.0]], jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y
      Array([[-1, 1, -1, 1]], dtype=bfloat16)
    """

    def _region(self, x: jax.Array) -> Region | None:
        given = self.num_groups, self.group_size
        return group_norm_region(self, x) if given.count(None) == 1 else None  # else Flax refuses


class InstanceNorm(Normalization, flax_nn.InstanceNorm):
    """`flax.linen.InstanceNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Example:
      >>> layer = linen.InstanceNorm(dtype_policy="p=f32,c=bf16")
      >>> x = jnp.asarray([[[1000.0], [1008.0]]], jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y.ravel()
      Array([-1, 1], dtype=bfloat16)
    """

    _region = instance_norm_region


class BatchNorm(Normalization, flax_nn.BatchNorm):
    """`flax.linen.BatchNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Running statistics are stored in the wider of float32 and reduction_dtype, not in param_dtype.

    Under a policy, a batch without elements, or whose mask keeps none, is normalised by the running
    statistics, which stay as they are; devices of `axis_name` whose mask keeps none are left out.
    Without a policy they become NaN, as in Flax.

    Example:
      >>> layer = linen.BatchNorm(use_running_average=False, dtype_policy="p=f32,c=bf16")
      >>> x = jnp.asarray([[1000.0], [1008.0]], jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y.ravel(), variables["batch_stats"]["mean"].dtype
      (Array([-1, 1], dtype=bfloat16), dtype('float32'))
    """

    _region = batch_norm_region

    def _running(self, call: NormCall, policy: Policy) -> Sequence[flax_nn.Variable]:
        dtype = statistics_dtype(policy.reduction_dtype)
        mean = self.variable("batch_stats", "mean", lambda s: jnp.zeros(s, dtype), call.shape)
        var = self.variable("batch_stats", "var", lambda s: jnp.ones(s, dtype), call.shape)
        return mean, var

    def _takes_statistics(self, call: NormCall) -> bool:
        flags = self.use_running_average, call.use_running_average
        return not merge_param("use_running_average", *flags) and call.x.size != 0
