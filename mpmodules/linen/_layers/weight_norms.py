"""WeightNorm and SpectralNorm: norms of weights in reduction_dtype.

Stored weights keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules.functions import functional
from mpmodules.functions.promotion import mixing_allowed
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import dtype_fields, fields_set, plain_fields
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.functions.widening import reduction_dtype_of


class ReparameterizedWeights(Module):
    """Base class of both wrappers, which count as modules and pass normalised weights to the layer
    inside.

    Weights are widened to reduction_dtype before their norm is taken. While the layer initialises
    (and wherever the params are mutable) Flax stores the normalised weights: there they are rounded
    to the weights' dtype, so that param_dtype holds. Everywhere else the layer gets them unrounded
    under a policy, and rounds them once, as it would any weight; with no policy it gets them in
    Flax's `dtype`.
    """

    _dtype_fields: ClassVar[bool] = True
    _reads_in: ClassVar[Any] = (
        None  # while weights are being normalised: the dtype to read parameters in
    )

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        return dtype_fields(self, policy)

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        with fields_set(self, plain_fields(self, effective) | {"_obeys": effective.policy}):
            return method(self, *args, **kwargs)

    _obeys: ClassVar[Policy | None] = (
        None  # while a call is under way: the policy that the call obeys
    )

    @flax_nn.nowrap
    def _normalised(
        self, normalise: Callable[[jax.Array], jax.Array], weights: Any, **fields: Any
    ) -> jax.Array:
        """Computes ``normalise(weights)`` in reduction_dtype, and returns it in the dtype that the
        layer inside gets.

        Args:
          normalise: Flax's own function: weights in, weights of the same shape out.
          weights: a parameter of the layer inside, any shape.
          fields: other values for fields of this module while `normalise` runs.
        """
        weights = jnp.asarray(weights)
        if not jnp.issubdtype(weights.dtype, jnp.inexact):
            return normalise(weights)
        wide = reduction_dtype_of(weights)
        widened = functional.widen(weights, wide)
        with fields_set(self, {"dtype": wide, "_reads_in": wide, **fields}):
            normalised = normalise(widened)
        if normalised is widened:
            return weights  # none of those that are normalised
        if self.is_mutable_collection("params"):
            return cast_array(normalised, weights.dtype)
        if self._obeys is not None:
            return normalised
        return cast_array(
            normalised, self._inferred_dtype(weights) if self.dtype is None else self.dtype
        )

    @flax_nn.nowrap
    def _inferred_dtype(self, weights: jax.Array) -> Any:
        """Returns Flax's result dtype where none is given: the one that weights and its own
        parameters promote to.
        """
        with mixing_allowed():
            return jnp.result_type(
                weights.dtype, self.param_dtype if getattr(self, "use_scale", True) else weights
            )

    @flax_nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **kwargs: Any) -> Any:
        """Returns Flax's `param`.

        While weights are being normalised the value is read in reduction_dtype.
        """
        value = super().param(name, init_fn, *init_args, **kwargs)
        return value if self._reads_in is None else functional.widen(value, self._reads_in)


class WeightNorm(ReparameterizedWeights, flax_nn.WeightNorm):
    """`flax.linen.WeightNorm` that obeys policies: norms in reduction_dtype, weights and scales
    kept in param_dtype.

    Example:
      >>> layer = linen.WeightNorm(linen.Dense(3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(variables)}
      ((2, 3), dtype(bfloat16), {'float32'})
    """

    param_dtype: DTypeLike | None = None

    def _l2_normalize(self, path: Any, vs: Any) -> Any:
        return self._normalised(
            lambda weights: flax_nn.WeightNorm._l2_normalize(self, path, weights), vs
        )


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

    param_dtype: DTypeLike | None = None

    def _spectral_normalize(self, path: Any, vs: Any, update_stats: bool) -> Any:
        def normalise(weights: jax.Array) -> jax.Array:
            return flax_nn.SpectralNorm._spectral_normalize(self, path, weights, update_stats)

        statistics = reduction_dtype_of(jnp.asarray(vs), jnp.zeros((), self.param_dtype))
        return self._normalised(normalise, vs, param_dtype=statistics)
