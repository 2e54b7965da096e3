"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.module import first_from
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import LayerCall
from mpmodules.functions import functional
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
)
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._resolution import in_complex
from policy.core.policy import Policy
from policy.core.scope import Source


class Normalization(Layer):
    """Base class of the normalisations.

    Input, scale, bias and running statistics are widened to reduction_dtype before anything is
    computed, and the result is rounded once. Where the layer is a boundary, nothing is rounded on
    the way in. The residuals of a half input are that input and the statistics, no float32 copy.

    Without `use_fast_variance`, Flax's one-pass E[x^2] - E[x]^2 runs where no policy holds, and
    under a policy a variance that does not cancel: of half inputs exact sums in one pass
    (`mpmodules.functions.moments`), of others one pass over data shifted by a few of its elements,
    and two passes where there is a mask or an axis name. A value given by the user is obeyed.

    Flax's own method runs without a policy, where nothing is half, and with a `promote_dtype` of
    the user's own.
    """

    axis_name: str | None
    scale: flax_nnx.Param | None
    use_fast_variance: bool

    _region: ClassVar[Callable[..., Region | None]] = layer_norm_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    _takes_mean: ClassVar[bool] = True
    _chooses_variance = True  # False where the user gave use_fast_variance

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if kwargs.get("use_fast_variance", True) is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "use_fast_variance"}
        super()._construct(policy, source, upstream_init, args, kwargs)
        if "use_fast_variance" in kwargs:
            self._chooses_variance = False

    def _call_layer(self, call: LayerCall) -> Any:
        is_users, dtype = self.promote_dtype is not promote_dtype, call.returned_dtype
        norm = None if is_users else norm_call_of(self, call)
        if norm is None:
            with mixing_allowed(not is_users):
                return call.run(in_complex(self, call) or self)
        if call.policy is not None:
            return self._normalised(norm, call.policy, dtype)
        stored = [v[...] for v in (self.scale, self._bias, *self._running()) if v is not None]
        with mixing_allowed():  # what Flax infers, asked for without computing anything
            dtype = canonicalize_dtype(norm.x, *stored, dtype=self.dtype)
        if any(functional.is_half(d) for d in (dtype, norm.x.dtype, *(v.dtype for v in stored))):
            return self._normalised(norm, None, dtype)
        return call.run(self)

    def _normalised(self, call: NormCall, policy: Policy | None, dtype: DTypeLike) -> jax.Array:
        """Normalises, and updates running statistics in the dtype that they are stored in."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self._bias))
        running, takes_statistics = self._running(), self._takes_statistics(call)
        chooses = policy is not None and self._chooses_variance
        y, updated = normalized(
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

    @property
    def _bias(self) -> flax_nnx.Param | None:
        return getattr(self, "bias", None)  # an RMSNorm has none

    def _running(self) -> Sequence[flax_nnx.Variable]:
        """Returns the running mean and variance, if the layer has them."""
        return ()

    def _takes_statistics(self, call: NormCall) -> bool:
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
        region = group_norm_region(self, x)
        return region if region is not None and len(region.axes) == x.ndim - 2 else None


class InstanceNorm(Normalization, flax_nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` that obeys policies: statistics in reduction_dtype, one rounding at
    the end.

    Example:
      >>> layer = nnx.InstanceNorm(1, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([[[1000.0], [1008.0]]], jnp.bfloat16)).ravel()
      Array([-1, 1], dtype=bfloat16)
    """

    _region = instance_norm_region


class BatchNorm(Normalization, flax_nnx.BatchNorm):
    """`flax.nnx.BatchNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Running statistics are stored in the wider of float32 and reduction_dtype, not in param_dtype.

    Under a policy, a batch without elements, or whose mask keeps none, is normalised by the running
    statistics, which stay as they are; devices of `axis_name` whose mask keeps none are left out.
    Without a policy they become NaN, as in Flax.

    Example:
      >>> layer = nnx.BatchNorm(1, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.asarray([[1000.0], [1008.0]], jnp.bfloat16))
      >>> y.ravel(), layer.mean[...].dtype
      (Array([-1, 1], dtype=bfloat16), dtype('float32'))
    """

    _region = batch_norm_region

    def _running(self) -> Sequence[flax_nnx.Variable]:
        return self.mean, self.var

    def _takes_statistics(self, call: NormCall) -> bool:
        flag = first_from(
            call.use_running_average,
            self.use_running_average,
            error_msg="No `use_running_average` was given to BatchNorm, neither to its constructor "
            "nor to its call nor by `nnx.view`.",
        )
        return not flag and call.x.size != 0

    def _capture(self, policy: Policy | None, source: Source) -> None:
        super()._capture(policy, source)
        if policy is not None and functional.is_wider(policy.reduction_dtype, jnp.float32):
            self.mean.set_value(self.mean[...].astype(policy.reduction_dtype))
            self.var.set_value(self.var[...].astype(policy.reduction_dtype))
