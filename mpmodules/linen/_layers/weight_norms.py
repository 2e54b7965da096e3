"""WeightNorm and SpectralNorm: norms of weights in reduction_dtype.

Stored weights keep their dtype.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules.calls.boundary import LayerCall
from mpmodules.functions import functional
from mpmodules.layers import weight_norms as norms
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import fields_set, plain_fields
from policy.core.arrays import cast_array
from policy.core.policy import Policy
from policy.core.scope import reduction_dtype_of


class ReparameterizedWeights(Module):
    """Base class of both wrappers, which count as modules and pass normalised weights to the layer
    inside.

    Weights are widened to reduction_dtype before their norm is taken. While the layer initialises
    (and wherever the params are mutable) Flax stores the normalised weights: there they are rounded
    to the weights' dtype, so that param_dtype holds. Everywhere else the layer gets them unrounded
    under a policy, and rounds them once, as it would any weight; with no policy it gets them in
    Flax's `dtype`.
    """

    param_dtype: DTypeLike | None = None

    _dtype_fields: ClassVar[bool] = True
    _obeys: ClassVar[Policy | None] = None  # the policy that a call under way obeys

    def _call_layer(self, call: LayerCall) -> Any:
        with fields_set(self, plain_fields(self, call.effective) | {"_obeys": call.policy}):
            return call.run(self)

    @flax_nn.nowrap
    def _rounded(self, normalised: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns normalised weights in the dtype that the layer inside gets."""
        if self.is_mutable_collection("params"):
            return cast_array(normalised, weights.dtype)
        if self._obeys is not None:
            return normalised
        return cast_array(normalised, norms.inferred_dtype(self, weights))

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
        wide = functional.widen(weights, reduction_dtype_of(weights))
        normalised = norms.weight_norm(wide, scale, features=features, epsilon=self.epsilon)
        return self._rounded(normalised, weights)


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
        if not norms.is_normalised_by_spectrum(self, weights, "Input"):
            return weights
        dtype = reduction_dtype_of(weights, jnp.zeros((), self.param_dtype))
        u_name, held = f"{name}/u", self.collection_name
        key = None if self.has_variable(held, u_name) else self.make_rng("params")
        u = self.variable(held, u_name, jax.random.normal, key, (1, weights.shape[-1]), dtype)
        sigma = self.variable(held, f"{name}/sigma", jnp.ones, (), dtype)
        wide = functional.widen(weights, reduction_dtype_of(weights))
        normalised, new_u, new_sigma = norms.spectral_norm(
            wide, u.value, steps=self.n_steps, epsilon=self.epsilon
        )
        if update_stats:
            u.value, sigma.value = new_u, new_sigma
        return self._rounded(normalised, weights)
