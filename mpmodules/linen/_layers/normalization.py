"""The normalizations: statistics, scale and bias in reduction_dtype, one rounding at the end; and
those of weights, WeightNorm and SpectralNorm, which keep stored weights in their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.module import merge_param
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.functions.functional import mixing_allowed, widen
from mpmodules.functions.normalization import Region
from mpmodules.layers import normalization_calls as norms
from mpmodules.linen._layer import Layer
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import (
    declared_field,
    dtype_fields,
    plain_fields,
    viewed,
)
from policy.core.arrays import cast_array
from policy.core.messages import warn_once
from policy.core.policy import Policy
from policy.core.scope import computes_in_half, reduction_dtype_of


class Normalization(Layer):
    """Base class of the normalizations.

    The input is widened to reduction_dtype before the statistics, scale and bias are read in
    reduction_dtype, and the result is rounded once. Where the layer is a boundary, nothing is
    rounded on the way in. The residuals of a half input are that input and the statistics, no
    float32 copy.

    `use_fast_variance` is None by default: with no policy in force that is Flax's one-pass E[x^2] -
    E[x]^2, under a policy a variance that does not cancel: of half inputs exact sums in one pass
    (`mpmodules.functions.normalization`), of others one pass over data shifted by a few of its
    elements, and two passes where there is a mask or an axis name. A value given by the user is
    obeyed.

    Without a policy Flax's own method runs, and with one where an interceptor is around it.
    """

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

    _region: ClassVar[Callable[..., Region | None]] = norms.layer_norm_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    _takes_mean: ClassVar[bool] = True

    def _policy_fields(self, policy: Policy | None) -> dict[str, Any]:
        fast = declared_field(self, "use_fast_variance")
        fields = dtype_fields(self, policy)
        fields["use_fast_variance"] = policy is None if fast is None else fast
        return fields if policy is None else fields | {"dtype": policy.reduction_dtype}

    def _call_layer(self, call: MethodCall) -> Any:
        policy, dtype = call.policy, call.returned_dtype
        if call.effective.dtype is not None:  # an explicit complex one
            policy = None
        norm = None if policy is None else norms.norm_call_of(self, call)
        if policy is not None and norm is not None:
            if not getattr(self, "force_float32_reductions", True) and computes_in_half(policy):
                warn_once(
                    f"{type(self).__name__}(force_float32_reductions=False) has no effect under "
                    f"'{policy}', which sums in {policy.reduction_dtype}: leave it out."
                )
            with viewed(self, dtype_fields(self, policy)) as view:
                return view._normalized(norm, policy, dtype)
        with mixing_allowed():  # Flax asks how float64 promotes
            y = super()._call_layer(call)
        return y if policy is None else cast_array(y, dtype)

    def _normalized(self, call: norms.NormCall, policy: Policy, dtype: DTypeLike) -> jax.Array:
        """Normalizes, with parameters and running statistics that are created or read as Flax's."""
        running = self._running(call, policy)
        takes_statistics = self._takes_statistics(call)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, call.shape, self.param_dtype)
        if getattr(self, "use_bias", False):
            bias = self.param("bias", self.bias_init, call.shape, self.param_dtype)
        y, updated = norms.normalized(
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

    def _running(self, call: norms.NormCall, policy: Policy) -> Sequence[flax_nn.Variable]:
        """Returns the variables of the running mean and variance, if the layer has them."""
        return ()

    def _takes_statistics(self, call: norms.NormCall) -> bool:
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
        return (
            norms.group_norm_region(self, x) if given.count(None) == 1 else None
        )  # else Flax rejects


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

    _region = norms.instance_norm_region


class BatchNorm(Normalization, flax_nn.BatchNorm):
    """`flax.linen.BatchNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Running statistics are stored in the wider of float32 and reduction_dtype, not in param_dtype.

    Under a policy, a batch without elements, or whose mask keeps none, is normalized by the running
    statistics, which stay as they are; devices of `axis_name` whose mask keeps none are left out.
    Without a policy they become NaN, as in Flax.

    Example:
      >>> layer = linen.BatchNorm(use_running_average=False, dtype_policy="p=f32,c=bf16")
      >>> x = jnp.asarray([[1000.0], [1008.0]], jnp.bfloat16)
      >>> y, variables = layer.init_with_output(key, x)
      >>> y.ravel(), variables["batch_stats"]["mean"].dtype
      (Array([-1, 1], dtype=bfloat16), dtype('float32'))
    """

    _region = norms.batch_norm_region

    def _running(self, call: norms.NormCall, policy: Policy) -> Sequence[flax_nn.Variable]:
        dtype = norms.statistics_dtype(policy.reduction_dtype)
        mean = self.variable("batch_stats", "mean", lambda s: jnp.zeros(s, dtype), call.shape)
        var = self.variable("batch_stats", "var", lambda s: jnp.ones(s, dtype), call.shape)
        return mean, var

    def _takes_statistics(self, call: norms.NormCall) -> bool:
        flags = self.use_running_average, call.use_running_average
        return not merge_param("use_running_average", *flags) and call.x.size != 0


class ReparameterizedWeights(Module):
    """Base class of both wrappers, which count as modules and pass normalized weights to the layer
    inside.

    Weights are widened to reduction_dtype before their norm is taken. While the layer initializes
    (and wherever the params are mutable) Flax stores the normalized weights: there they are rounded
    to the weights' dtype, so that param_dtype holds. Everywhere else the layer gets them unrounded
    under a policy, and rounds them once, as it would any weight; with no policy it gets them in
    Flax's `dtype`.
    """

    param_dtype: DTypeLike | None = None

    _dtype_fields: ClassVar[bool] = True
    _obeys: ClassVar[Policy | None] = None  # the policy that a call under way obeys

    def _call_layer(self, call: MethodCall) -> Any:
        fields = plain_fields(self, call.effective) | {"_obeys": call.policy}
        with viewed(self, fields) as view:
            return call.run(view)

    @flax_nn.nowrap
    def _rounded(self, normalized: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns normalized weights in the dtype that the layer inside gets."""
        if self.is_mutable_collection("params"):
            return cast_array(normalized, weights.dtype)
        if self._obeys is not None:
            return normalized
        return cast_array(normalized, norms.inferred_dtype(self, weights))

    @flax_nn.nowrap
    def _name_of(self, path: Any) -> str:
        inside = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        return f"{self.layer_instance.name}/{inside}"


class WeightNorm(ReparameterizedWeights, flax_nn.WeightNorm):
    """`flax.linen.WeightNorm` that obeys policies: norms in reduction_dtype, weights and scales
    kept in param_dtype.

    Example:
      >>> layer = linen.WeightNorm(linen.Dense(3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(variables)}
      ((2, 3), dtype(bfloat16), {'float32'})
    """

    def _l2_normalize(self, path: Any, vs: Any) -> Any:
        weights, name = jnp.asarray(vs), self._name_of(path)
        is_chosen = not self.variable_filter or any(n in name for n in self.variable_filter)
        if not is_chosen or not jnp.issubdtype(weights.dtype, jnp.inexact):
            return weights
        features, scale = norms.feature_axes(self.feature_axes, weights), None
        if self.use_scale:
            shape = [weights.shape[axis] for axis in features]
            scale = self.param(f"{name}/scale", self.scale_init, shape, self.param_dtype)
        wide = widen(weights, reduction_dtype_of(weights))
        normalized = norms.weight_norm(wide, scale, features=features, epsilon=self.epsilon)
        return self._rounded(normalized, weights)


class SpectralNorm(ReparameterizedWeights, flax_nn.SpectralNorm):
    """`flax.linen.SpectralNorm` that obeys policies: the power iteration in reduction_dtype,
    weights in param_dtype.

    Its statistics `u` and `sigma` are stored in the wider of float32 and reduction_dtype, not in
    param_dtype.

    Example:
      >>> layer = linen.SpectralNorm(linen.Dense(3), dtype_policy="p=f32,c=bf16")
      >>> x = jnp.ones((2, 4))
      >>> y, variables = layer.init_with_output(key, x, update_stats=False)
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(variables)}
      ((2, 3), dtype(bfloat16), {'float32'})
    """

    def _spectral_normalize(self, path: Any, vs: Any, update_stats: bool) -> Any:
        weights, name = jnp.asarray(vs), self._name_of(path)
        if not norms.is_normalized_by_spectrum(self, weights, "Input"):
            return weights
        dtype = reduction_dtype_of(weights, jnp.zeros((), self.param_dtype))
        u_name, held = f"{name}/u", self.collection_name
        key = None if self.has_variable(held, u_name) else self.make_rng("params")
        u = self.variable(held, u_name, jax.random.normal, key, (1, weights.shape[-1]), dtype)
        sigma = self.variable(held, f"{name}/sigma", jnp.ones, (), dtype)
        wide = widen(weights, reduction_dtype_of(weights))
        normalized, new_u, new_sigma = norms.spectral_norm(
            wide, u.value, steps=self.n_steps, epsilon=self.epsilon
        )
        if update_stats:
            u.value, sigma.value = new_u, new_sigma
        return self._rounded(normalized, weights)
