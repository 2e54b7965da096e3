"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype

from mpmodules import functional
from mpmodules.nnx._layer import Layer, viewed
from policy.casting import cast_array
from policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class PromoteTo:
    """A `promote_dtype` that casts everything to one dtype: nothing is rounded before the statistics."""

    reduction_dtype: np.dtype

    def __call__(self, arrays: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
        return tuple(None if x is None else jnp.asarray(x, self.reduction_dtype) for x in arrays)


class Normalization(Layer):
    """What the normalisations share.

    Input, scale, bias and running statistics are widened to reduction_dtype before anything is computed, and the
    result is rounded once. Where the layer is a boundary, nothing is rounded on the way in.

    Without `use_fast_variance`, Flax's one-pass E[x^2] - E[x]^2 runs where no policy holds, and under a policy a
    variance that does not cancel. A value given by the user is obeyed.
    """

    _takes_inputs_as_they_come: ClassVar[bool] = True
    _chooses_variance = True  # False where the user gave use_fast_variance

    def _construct(
        self,
        policy: Policy | None,
        source: str | None,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if kwargs.get("use_fast_variance", True) is None:
            kwargs = {name: value for name, value in kwargs.items() if name != "use_fast_variance"}
        super()._construct(policy, source, upstream_init, args, kwargs)
        if "use_fast_variance" in kwargs:
            self._chooses_variance = False

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        """The axes along which the input may be shifted before a one-pass variance, or None for two passes."""
        return None

    def _call_layer(
        self, crosses: bool, method: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        policy = self.dtype_policy
        x: Any = args[0] if args else kwargs.get("x")
        if self.promote_dtype is not promote_dtype or not hasattr(x, "dtype") or _is_complex(x):
            return method(self, *args, **kwargs)
        if policy is None:
            stored: list[Any] = [
                v[...] for v in (getattr(self, n, None) for n in ("mean", "var", "scale", "bias")) if v is not None
            ]
            with jax.numpy_dtype_promotion("standard"):  # what Flax infers, asked for without computing anything
                output_dtype = canonicalize_dtype(x, *stored, dtype=self.dtype)
            if not any(functional.is_half(dtype) for dtype in (output_dtype, x.dtype, *(v.dtype for v in stored))):
                return method(self, *args, **kwargs)
            return cast_array(method(_in(self, jnp.dtype(jnp.float32)), *args, **kwargs), output_dtype)
        x = jnp.asarray(x, policy.reduction_dtype)
        view = _in(self, policy.reduction_dtype)
        if self._chooses_variance:
            axes = self._shift_axes(x, kwargs)
            x = x if axes is None else functional.shifted(x, axes)
            view.__dict__["use_fast_variance"] = axes is not None
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, kwargs | {"x": x})
        # Flax's statistics promote their dtype with float32 in a way that strict promotion refuses for any other.
        strict = policy.reduction_dtype == jnp.float32
        with contextlib.nullcontext() if strict else jax.numpy_dtype_promotion("standard"):
            return cast_array(method(view, *args, **kwargs), self._returns(crosses))


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _in(module: Any, reduction_dtype: Any) -> Any:
    return viewed(module, promote_dtype=PromoteTo(reduction_dtype), dtype=reduction_dtype)


class LayerNorm(Normalization, flax_nnx.LayerNorm):
    """`flax.nnx.LayerNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end.

    Under a policy the one-pass variance runs over data shifted by one element of each row, which costs no second pass
    and does not cancel; with a mask or an axis name, two passes.
    """

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        return self.reduction_axes if self.axis_name is None and kwargs.get("mask") is None else None


class RMSNorm(Normalization, flax_nnx.RMSNorm):
    """`flax.nnx.RMSNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end."""


class GroupNorm(Normalization, flax_nnx.GroupNorm):
    """`flax.nnx.GroupNorm` that obeys policies: statistics in reduction_dtype (two passes), one rounding at the end."""


class InstanceNorm(Normalization, flax_nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end.

    The variance is taken as in `LayerNorm`.
    """

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        if self.axis_name is not None or kwargs.get("mask") is not None:
            return None
        features = {axis % x.ndim for axis in np.atleast_1d(np.asarray(self.feature_axes))}
        return [axis for axis in range(1, x.ndim) if axis not in features]


class BatchNorm(Normalization, flax_nnx.BatchNorm):
    """`flax.nnx.BatchNorm` that obeys policies: statistics in reduction_dtype (two passes), one rounding at the end.

    Running statistics are stored in the wider of float32 and reduction_dtype, whatever param_dtype is.
    """

    def _capture(self, policy: Policy | None, source: str | None) -> None:
        super()._capture(policy, source)
        if policy is not None and functional.is_wider(policy.reduction_dtype, jnp.float32):
            self.mean.set_value(self.mean[...].astype(policy.reduction_dtype))
            self.var.set_value(self.var[...].astype(policy.reduction_dtype))
