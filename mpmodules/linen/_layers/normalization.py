"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.core import meta
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
from mpmodules.linen._layer import Layer, declared_field, half_safe_fields
from mpmodules.linen._resolution import dtype_fields, fields_set
from policy.core.casting import cast_array
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.functions.checkpointing import keeping_inputs, keeping_inputs_once


class _Deferred:
    """Stands for a variable while its layer runs inside of a transform: writes are collected and
    applied afterwards.
    """

    def __init__(self, variable: Any, updates: dict[str, jax.Array], name: str):
        self._variable, self._updates, self._name = variable, updates, name

    @property
    def value(self) -> Any:
        return self._updates.get(self._name, self._variable.value)

    @value.setter
    def value(self, value: Any) -> None:
        self._updates[self._name] = value


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
    """

    _region: ClassVar[Callable[..., Region | None]] = no_region
    _takes_inputs_as_they_come: ClassVar[bool] = True
    # While a call is under way: the dtype to read parameters in, and what it writes to variables.
    _reads_in: ClassVar[Any] = None
    _updates: ClassVar[dict[str, jax.Array] | None] = None
    _running: ClassVar[tuple[str, ...]] = ()  # the running statistics

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        fast = declared_field(self, "use_fast_variance")
        if policy is None:
            return dtype_fields(self, None) | {"use_fast_variance": True if fast is None else fast}
        fields = dtype_fields(self, policy) | {
            "dtype": policy.reduction_dtype,
            "_reads_in": policy.reduction_dtype,
        }
        return fields | {"use_fast_variance": False if fast is None else fast}

    def _takes_statistics(self, use_running_average: bool | None) -> bool:
        """Returns whether a call with that argument takes statistics of its input."""
        return use_running_average is None

    def _call_layer(
        self,
        effective: Effective,
        crosses: bool,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        policy = effective.policy
        x = args[0] if args else kwargs.get("x")
        rest = kwargs if args else {name: value for name, value in kwargs.items() if name != "x"}
        if policy is not None and has_no_statistics(self, method, x, args[1:], rest):
            others, rest = by_running_average(args[1:], rest)
            with fields_set(self, {"use_running_average": None}):
                return self._call_layer(effective, crosses, method, (x, *others), rest)
        if policy is None or effective.dtype is not None or jnp.iscomplexobj(x):
            with mixing_allowed():  # Flax asks how float64 promotes
                return super()._call_layer(effective, crosses, method, args, kwargs)
        output_dtype = returned_dtype(policy, crosses)
        shifts = getattr(self, "axis_name", None) is None and rest.get("mask") is None
        shifts = shifts and declared_field(self, "use_fast_variance") is None
        shifts = shifts and self._takes_statistics(running_average_flag(args[1:], rest))
        x = jnp.asarray(x)
        if shifts and takes_exact_moments(self, method, x, args[1:], rest, policy):
            with contextlib.suppress(_NotThere):
                return self._normalized(x, output_dtype)
        run = _Run(method, policy, output_dtype, shifts, args[1:], tuple(rest.items()))
        keeps_input = saves_input(x, policy)
        # A call that may create parameters can't do so inside of a transform.
        remembered = keeps_input and not self.is_mutable_collection("params")
        y, updates = _remembered(self, run, x) if remembered else run(self, x)
        for name, value in updates.items():
            self.put_variable("batch_stats", name, value)
        return y

    def _normalized(self, x: jax.Array, output_dtype: DTypeLike) -> jax.Array:
        """Returns the result, from exact statistics, and updates running statistics.

        Raises:
          _NotThere: Flax's code is to run, which makes missing variables and refuses others.
        """
        region = self._region(x)
        cls = type(self)  # a user's `param` and `variable` are to be asked
        if region is None or cls.param is not Normalization.param:
            raise _NotThere
        if self._running and cls.variable is not BatchNorm.variable:
            raise _NotThere
        shape = tuple(x.shape[axis] for axis in feature_axes(self, x.ndim))
        scale = self._stored("params", "scale", shape) if self.use_scale else None
        bias = self._stored("params", "bias", shape) if self.use_bias else None
        running = {name: self._stored("batch_stats", name, shape) for name in self._running}
        y, *statistics = normalized(self, x, region, scale, bias, output_dtype)
        for (name, value), batch in zip(
            running.items(), statistics if running else (), strict=True
        ):
            self.put_variable("batch_stats", name, averaged(self, value, batch))
        return y

    def _stored(self, collection: str, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Returns the value of a variable that exists and has that shape."""
        value: Any = (
            meta.unbox(self.get_variable(collection, name)) if not self.is_initializing() else None
        )
        if getattr(value, "shape", None) != shape:
            raise _NotThere
        return value

    def _shifted_back(
        self, updates: dict[str, jax.Array], shift: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the updates of variables for the input before the shift."""
        return updates

    @flax_nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **kwargs: Any) -> Any:
        """Returns Flax's `param`.

        While the layer runs under a policy the value is read in reduction_dtype.
        """
        value = super().param(name, init_fn, *init_args, **kwargs)
        return value if self._reads_in is None else cast_array(value, self._reads_in)


class _Run(NormalizationCall):
    def __call__(self, layer: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result, and the values of the running statistics that the call writes."""
        updates: dict[str, jax.Array] = {}
        fields = layer._policy_fields(self.policy, self.output_dtype, self.method.__name__) | {
            "_updates": updates
        }
        fields |= half_safe_fields(layer, self.policy.param_dtype)
        x = jnp.asarray(x, self.policy.reduction_dtype)
        region = layer._region(x) if self.shifts or self.is_masked(layer) else None
        if region is not None and self.is_masked(layer):
            with contextlib.suppress(_NotThere), fields_set(layer, fields), mixing_allowed():
                return self._masked(layer, x, region)
        shift = None if region is None or not self.shifts else shift_of(region, x)
        if shift is not None:
            x, fields["use_fast_variance"] = x - shift, True
        with (
            fields_set(layer, fields),
            mixing_allowed(),
        ):  # Flax's statistics mix dtypes where the input is half
            y = self.method(layer, x, *self.args, **dict(self.rest))
        return cast_array(y, self.output_dtype), updates if shift is None else layer._shifted_back(
            updates, shift
        )

    def _masked(
        self, layer: Any, x: jax.Array, region: Region
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Normalises by the statistics of unmasked elements, handed to Flax's method as running
        ones.
        """
        args, rest = by_running_average(self.args, dict(self.rest))
        shape = tuple(x.shape[axis] for axis in feature_axes(layer, x.ndim))
        running = {name: layer._stored("batch_stats", name, shape) for name in layer._running}
        statistics, updated = masked_statistics(layer, x, rest.pop("mask"), region.axes, running)
        with fields_set(layer, {"use_running_average": None, "_updates": statistics}):
            return cast_array(self.method(layer, x, *args, **rest), self.output_dtype), updated


def _remembered(layer: Any, run: _Run, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs `run` with the uncast input as backward's residual, traced once for all layers that are
    alike.
    """
    parts = _parts(layer, run)
    if parts is not None:
        with contextlib.suppress(_NotThere):
            return keeping_inputs_once(_run_apart, run, type(layer), parts.fields)(
                x, parts.variables
            )
    return keeping_inputs(functools.partial(run, layer))(x)


class _NotThere(Exception):
    """A variable is missing, or has another shape: Flax is to say so, of the layer itself."""


class _Parts(NamedTuple):
    """A layer taken apart: the fields that determine its program, and its variables by name."""

    fields: tuple[tuple[str, Hashable], ...]
    variables: dict[str, jax.Array]


_VARIABLES = {"params": ("scale", "bias"), "batch_stats": ("mean", "var")}


def _parts(layer: Any, run: _Run) -> _Parts | None:
    """Returns the parts of a layer whose call is Flax's own and needs nothing else of it, else
    None.
    """
    fields = frozen((field.name, getattr(layer, field.name)) for field in dataclasses.fields(layer))
    if fields is None or layer.is_initializing() or not run.is_of(layer, __name__):
        return None
    variables = {
        name: meta.unbox(layer.get_variable(collection, name))
        for collection, names in _VARIABLES.items()
        for name in names
        if layer.has_variable(collection, name)
    }
    return _Parts(fields, variables)


def _run_apart(
    run: _Run,
    kind: type,
    fields: tuple[tuple[str, Any], ...],
    x: jax.Array,
    variables: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs `run` on an unbound layer that is put together again from its parts."""
    layer: Any = object.__new__(kind)
    layer.__dict__.update(fields)
    layer.__dict__.update(dict.fromkeys(("scale_init", "bias_init")))

    def param(name: str, init: Any, shape: tuple[int, ...], *_: Any) -> jax.Array:
        if name not in variables or getattr(variables[name], "shape", None) != tuple(shape):
            raise _NotThere
        return cast_array(variables[name], layer._reads_in)

    def variable(collection: str, name: str, *_: Any) -> Any:
        if name not in variables:
            raise _NotThere
        return _Deferred(types.SimpleNamespace(value=variables[name]), layer._updates, name)

    layer.__dict__.update(param=param, variable=variable, is_initializing=lambda: False)
    return run(layer, x)


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

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

    _region = layer_norm_region


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

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None


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

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

    _region = group_norm_region


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

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

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

    param_dtype: DTypeLike | None = None
    use_fast_variance: Any = None  # a bool, or None

    _running: ClassVar[tuple[str, ...]] = ("mean", "var")
    _region = batch_norm_region

    def _takes_statistics(self, use_running_average: bool | None) -> bool:
        given = [
            flag for flag in (self.use_running_average, use_running_average) if flag is not None
        ]
        return len(given) == 1 and not given[0]  # none, or two, are Flax's to refuse

    def _shifted_back(
        self, updates: dict[str, jax.Array], shift: jax.Array
    ) -> dict[str, jax.Array]:
        if "mean" not in updates:
            return updates
        mean = updates["mean"]
        return updates | {"mean": mean + (1 - self.momentum) * shift.reshape(mean.shape)}

    @flax_nn.nowrap
    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns Flax's `variable`.

        Running statistics are created in the wider of reduction_dtype and float32.
        """
        make, reads_in = init_fn, self._reads_in
        if make is not None and reads_in is not None:
            init_fn = lambda *args, **kwargs: functional.widen(make(*args, **kwargs), reads_in)  # noqa: E731
        variable = super().variable(col, name, init_fn, *init_args, **kwargs)
        return variable if self._updates is None else _Deferred(variable, self._updates, name)
