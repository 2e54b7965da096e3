"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from jax.typing import DTypeLike

from mpmodules.calls.boundary import returned_dtype
from mpmodules.functions import functional
from mpmodules.functions.moments import Region, shift_of
from mpmodules.functions.promotion import mixing_allowed
from mpmodules.layers.normalization_calls import (
    NormalizationCall,
    averaged,
    batch_norm_region,
    by_running_average,
    feature_axes,
    frozen,
    group_norm_region,
    has_no_statistics,
    instance_norm_region,
    layer_norm_region,
    masked_statistics,
    no_region,
    normalized,
    running_average_flag,
    saves_input,
    takes_exact_moments,
)
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._resolution import in_complex, viewed
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import Source
from policy.functions.checkpointing import keeping_inputs, keeping_inputs_once


@dataclasses.dataclass(frozen=True)
class PromoteTo:
    """A `promote_dtype` that casts everything to one dtype: nothing is rounded before the
    statistics.
    """

    reduction_dtype: np.dtype

    def __call__(
        self, arrays: tuple[Any, ...], /, *, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> tuple[Any, ...]:
        return tuple(None if x is None else jnp.asarray(x, self.reduction_dtype) for x in arrays)


class Normalization(Layer):
    """Base class of the normalisations.

    Input, scale, bias and running statistics are widened to reduction_dtype before anything is
    computed, and the result is rounded once. Where the layer is a boundary, nothing is rounded on
    the way in. The residuals of a half input are that input and the statistics, no float32 copy.

    Without `use_fast_variance`, Flax's one-pass E[x^2] - E[x]^2 runs where no policy holds, and
    under a policy a variance that does not cancel: of half inputs exact sums in one pass
    (`mpmodules.functions.moments`), of others one pass over data shifted by a few of its elements,
    and two passes where there is a mask or an axis name. A value given by the user is obeyed.
    """

    axis_name: str | None

    _region: ClassVar[Callable[..., Region | None]] = no_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    _running: ClassVar[tuple[str, ...]] = ()  # the running statistics
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

    def _normalized(self, x: jax.Array, output_dtype: DTypeLike) -> jax.Array | None:
        """Returns the result from exact statistics, and updates running ones.

        Returns None where Flax's code is to run.
        """
        region = self._region(x)
        if region is None:
            return None
        shape = tuple(x.shape[axis] for axis in feature_axes(self, x.ndim))
        values: dict[str, Any] = {
            name: None if (v := getattr(self, name)) is None else v[...]
            for name in _VALUES
            if hasattr(self, name)
        }
        if any(value is not None and value.shape != shape for value in values.values()):
            return None
        y, *statistics = normalized(self, x, region, values["scale"], values["bias"], output_dtype)
        for name, batch in zip(self._running, statistics if self._running else (), strict=True):
            self._put(name, averaged(self, values[name], batch))
        return y

    def _put(self, name: str, value: jax.Array) -> None:
        """Writes a running statistic, in the dtype that it is stored in."""
        variable = getattr(self, name)
        variable[...] = jax.lax.stop_gradient(value).astype(variable[...].dtype)

    def _shifted_back(
        self, updates: dict[str, jax.Array], shift: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the updated running statistics for the input before the shift."""
        return updates

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        x: Any = args[0] if args else kwargs.get("x")
        if self.promote_dtype is not promote_dtype or not hasattr(x, "dtype"):
            return method(self, *args, **kwargs)
        if functional.complex_input((x,)) is not None:
            with mixing_allowed():
                return method(in_complex(self, args, kwargs) or self, *args, **kwargs)
        if policy is None:
            stored: list[Any] = [
                v[...]
                for v in (getattr(self, n, None) for n in ("mean", "var", "scale", "bias"))
                if v is not None
            ]
            with mixing_allowed():  # what Flax infers, asked for without computing anything
                output_dtype = canonicalize_dtype(x, *stored, dtype=self.dtype)
            if not any(
                functional.is_half(dtype)
                for dtype in (output_dtype, x.dtype, *(v.dtype for v in stored))
            ):
                return method(self, *args, **kwargs)
            return cast_array(
                method(_in(self, jnp.dtype(jnp.float32)), *args, **kwargs), output_dtype
            )
        output_dtype = returned_dtype(policy, crosses)
        others: tuple[Any, ...] = args[1:]
        rest = kwargs if args else {name: value for name, value in kwargs.items() if name != "x"}
        if has_no_statistics(self, method, x, others, rest):
            others, rest = by_running_average(others, rest)
        use_running_average = running_average_flag(others, rest)
        shifts = self._chooses_variance and self.axis_name is None and rest.get("mask") is None
        shifts = shifts and self._takes_statistics(use_running_average)
        x = jnp.asarray(x)
        if shifts and takes_exact_moments(self, method, x, others, rest, policy):
            y = self._normalized(x, output_dtype)
            if y is not None:
                return y
        run = _Run(method, policy, output_dtype, shifts, others, tuple(rest.items()))
        keeps_input = saves_input(x, policy)
        y, updates = _remembered(self, run, x) if keeps_input else run(self, x)
        if not self._uses_running_average(use_running_average):
            for statistic, value in updates.items():
                self._put(statistic, value)
        return y

    def _takes_statistics(self, use_running_average: bool | None) -> bool:
        """Returns whether a call with that argument takes statistics of its input."""
        return use_running_average is None

    def _uses_running_average(self, use_running_average: bool | None) -> bool:
        """Returns whether a call with that argument reads the running statistics, rather than
        updating them.
        """
        return not self._running


class _Run(NormalizationCall):
    def __call__(self, layer: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result, and the running statistics after the call."""
        args, rest = self.args, dict(self.rest)
        x = jnp.asarray(x, self.policy.reduction_dtype)
        view = _in(layer, self.policy.reduction_dtype)
        statistics = {statistic: getattr(layer, statistic)[...] for statistic in layer._running}
        region = layer._region(x) if self.shifts or self.is_masked(layer) else None
        shift = None if region is None or not self.shifts else shift_of(region, x)
        if layer._chooses_variance:
            view.__dict__["use_fast_variance"] = shift is not None
        x = x if shift is None else x - shift
        updates: dict[str, jax.Array] | None = None
        if region is not None and self.is_masked(
            layer
        ):  # statistics of what the mask keeps, as if they were running
            args, rest = by_running_average(args, rest)
            with mixing_allowed():
                statistics, updates = masked_statistics(
                    view, x, rest.pop("mask"), region.axes, statistics
                )
        for statistic, value in statistics.items():  # written in here, put in place outside
            view.__dict__[statistic] = flax_nnx.BatchStat(value)
        # Flax's statistics promote their dtype with float32 in a way that strict promotion refuses
        # for any other.
        with mixing_allowed(self.policy.reduction_dtype != jnp.float32):
            y = cast_array(self.method(view, x, *args, **rest), self.output_dtype)
        if updates is None:
            updates = {statistic: getattr(view, statistic)[...] for statistic in layer._running}
        return y, updates if shift is None else layer._shifted_back(updates, shift)


_VALUES = ("scale", "bias", "mean", "var")


def _remembered(layer: Any, run: _Run, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs `run` with the uncast input as backward's residual, traced once for all layers that are
    alike.
    """
    parts = _parts(layer, run)
    if parts is None:
        return keeping_inputs(functools.partial(run, layer))(x)
    attributes, variables = parts
    return keeping_inputs_once(_run_apart, run, type(layer), attributes)(x, variables)


def _parts(
    layer: Any, run: _Run
) -> tuple[tuple[tuple[str, Any], ...], dict[str, jax.Array]] | None:
    """Returns the attributes that determine a layer's program, and its variables by name.

    Returns None for a user's layer.
    """
    namespace = {
        name: value for name, value in vars(layer).items() if not name.startswith("_pytree__")
    }
    variables = {
        name: value for name, value in namespace.items() if isinstance(value, flax_nnx.Variable)
    }
    attributes = frozen((name, value) for name, value in namespace.items() if name not in variables)
    if attributes is None or not run.is_of(layer, __name__):
        return None
    return attributes, {name: variable[...] for name, variable in variables.items()}


def _run_apart(
    run: _Run,
    kind: type,
    attributes: tuple[tuple[str, Any], ...],
    x: jax.Array,
    variables: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs `run` on a layer that is put together again from its parts."""
    layer: Any = object.__new__(kind)
    layer.__dict__.update(attributes)
    layer.__dict__.update({name: flax_nnx.Param(value) for name, value in variables.items()})
    return run(layer, x)


def _in(module: Any, reduction_dtype: np.dtype) -> Any:
    return viewed(module, promote_dtype=PromoteTo(reduction_dtype), dtype=reduction_dtype)


class LayerNorm(Normalization, flax_nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = nnx.LayerNorm(2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16))
      Array([[-1, 1]], dtype=bfloat16)
    """

    _region = layer_norm_region


class RMSNorm(Normalization, flax_nnx.RMSNorm):
    """`flax.nnx.RMSNorm` that obeys policies: statistics in reduction_dtype, one rounding at the
    end.

    Example:
      >>> layer = nnx.RMSNorm(4, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.full((1, 4), 3.0, jnp.bfloat16))
      Array([[1, 1, 1, 1]], dtype=bfloat16)
    """


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

    _running = ("mean", "var")
    _region = batch_norm_region

    def _takes_statistics(self, use_running_average: bool | None) -> bool:
        flag = self.use_running_average if use_running_average is None else use_running_average
        return flag is not None and not flag  # where there is none, Flax says what to do

    def _uses_running_average(self, use_running_average: bool | None) -> bool:
        return bool(
            self.use_running_average if use_running_average is None else use_running_average
        )

    def _shifted_back(
        self, updates: dict[str, jax.Array], shift: jax.Array
    ) -> dict[str, jax.Array]:
        mean = updates["mean"]
        return updates | {"mean": mean + (1 - self.momentum) * shift.reshape(mean.shape)}

    def _capture(self, policy: Policy | None, source: Source) -> None:
        super()._capture(policy, source)
        if policy is not None and functional.is_wider(policy.reduction_dtype, jnp.float32):
            self.mean.set_value(self.mean[...].astype(policy.reduction_dtype))
            self.var.set_value(self.var[...].astype(policy.reduction_dtype))
