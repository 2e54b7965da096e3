"""The normalisations: statistics, scale and bias in reduction_dtype, one rounding at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np

from mpmodules import functional
from mpmodules.linen._layer import Layer, declared_field
from mpmodules.linen._module import dtype_fields, fields_set
from policy.casting import cast_array
from policy.policy import Policy
from policy.precedence import Effective


def _mixing_allowed() -> contextlib.AbstractContextManager[Any]:
    """Flax's statistics mix dtypes where the input is half, and ask how float64 promotes: strict promotion refuses."""
    return jax.numpy_dtype_promotion("standard")


class Normalization(Layer):
    """What the normalisations share.

    The input is widened to reduction_dtype before the statistics, scale and bias are read in reduction_dtype, and the
    result is rounded once. Where the layer is a boundary, nothing is rounded on the way in.

    `use_fast_variance` is None by default: with no policy in force that is Flax's one-pass E[x^2] - E[x]^2, under a
    policy a variance that does not cancel. A value given by the user is obeyed.
    """

    _takes_inputs_as_they_come: ClassVar[bool] = True
    _reads_in: ClassVar[Any] = None  # while a call is under way: the dtype to read parameters in

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        fast = declared_field(self, "use_fast_variance")
        if policy is None:
            return dtype_fields(self, None) | {"use_fast_variance": True if fast is None else fast}
        fields = dtype_fields(self, policy) | {"dtype": policy.reduction_dtype, "_reads_in": policy.reduction_dtype}
        return fields | {"use_fast_variance": False if fast is None else fast}

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        """The axes along which the input may be shifted before a one-pass variance, or None for two passes."""
        return None

    def _call_layer(
        self, effective: Effective, crosses: bool, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        policy = effective.policy
        x = args[0] if args else kwargs.get("x")
        if policy is None or effective.dtype is not None or jnp.iscomplexobj(x):
            with _mixing_allowed():
                return super()._call_layer(effective, crosses, method, args, kwargs)
        output_dtype = policy.output_dtype if crosses else policy.compute_dtype
        fields = self._policy_fields(policy, output_dtype, method.__name__)
        x = jnp.asarray(x, policy.reduction_dtype)
        axes = self._shift_axes(x, kwargs) if declared_field(self, "use_fast_variance") is None else None
        if axes is not None:
            x = functional.shifted(x, axes)
            fields["use_fast_variance"] = True
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, kwargs | {"x": x})
        with fields_set(self, fields), _mixing_allowed():
            return cast_array(method(self, *args, **kwargs), output_dtype)

    @flax_nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **kwargs: Any) -> Any:
        """Flax's `param`; while the layer runs under a policy the value is read in reduction_dtype."""
        value = super().param(name, init_fn, *init_args, **kwargs)
        return value if self._reads_in is None else cast_array(value, self._reads_in)


class LayerNorm(Normalization, flax_nn.LayerNorm):
    """`flax.linen.LayerNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end.

    Under a policy the one-pass variance runs over data shifted by one element of each row, which costs no second pass
    and does not cancel; with a mask or an axis name, two passes.
    """

    param_dtype: Any = None
    use_fast_variance: Any = None  # a bool, or None

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        return self.reduction_axes if self.axis_name is None and kwargs.get("mask") is None else None


class RMSNorm(Normalization, flax_nn.RMSNorm):
    """`flax.linen.RMSNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end."""

    param_dtype: Any = None
    use_fast_variance: Any = None  # a bool, or None


class GroupNorm(Normalization, flax_nn.GroupNorm):
    """`flax.linen.GroupNorm` that obeys policies: statistics in reduction_dtype (two passes), one rounding."""

    param_dtype: Any = None
    use_fast_variance: Any = None  # a bool, or None


class InstanceNorm(Normalization, flax_nn.InstanceNorm):
    """`flax.linen.InstanceNorm` that obeys policies: statistics in reduction_dtype, one rounding at the end.

    The variance is taken as in `LayerNorm`.
    """

    param_dtype: Any = None
    use_fast_variance: Any = None  # a bool, or None

    def _shift_axes(self, x: jax.Array, kwargs: dict[str, Any]) -> Any:
        if self.axis_name is not None or kwargs.get("mask") is not None:
            return None
        features = {axis % x.ndim for axis in np.atleast_1d(np.asarray(self.feature_axes))}
        return [axis for axis in range(1, x.ndim) if axis not in features]


class BatchNorm(Normalization, flax_nn.BatchNorm):
    """`flax.linen.BatchNorm` that obeys policies: statistics in reduction_dtype (two passes), one rounding at the end.

    Running statistics are stored in the wider of float32 and reduction_dtype, whatever param_dtype is.
    """

    param_dtype: Any = None
    use_fast_variance: Any = None  # a bool, or None

    @flax_nn.nowrap
    def variable(
        self, col: str, name: str, init_fn: Callable[..., Any] | None = None, *init_args: Any, **kwargs: Any
    ) -> Any:
        """Flax's `variable`; running statistics are created in reduction_dtype where that is wider than float32."""
        make, reads_in = init_fn, self._reads_in
        if make is not None and reads_in is not None:
            init_fn = lambda *args, **kwargs: functional.widen(make(*args, **kwargs), reads_in)  # noqa: E731
        return super().variable(col, name, init_fn, *init_args, **kwargs)
