"""The base class of our linen layers, which puts the policy's dtypes in their fields for a call."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.functions.functional import half_safe_inits, is_half
from mpmodules.layers.matmul_calls import Numerics, numerics_of
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import dtype_fields, fields_set
from policy.core.policy import Policy


class Layer(Module):
    """A Flax layer that obeys policies.

    Its method runs, entered once, while the layer's `dtype` and `param_dtype` fields hold the
    policy's dtypes.
    """

    _is_layer: ClassVar[bool] = True
    _dtype_fields: ClassVar[bool] = True
    # Whether a boundary leaves the inputs to the layer: it widens them, or looks them up, before
    # any rounding.
    _takes_inputs_as_they_come: ClassVar[bool] = False
    _numerics: ClassVar[Numerics] = Numerics()  # in a call, an attribute: those of the policy

    def _policy_fields(self, policy: Policy | None) -> dict[str, Any]:
        """Returns the dataclass fields to set for a call under a policy."""
        return dtype_fields(self, policy)

    def _call_layer(self, call: MethodCall) -> Any:
        policy, dtype = call.policy, call.effective.dtype
        complex_dtype = call.complex_dtype
        if policy is not None and dtype is None and complex_dtype is not None:
            with fields_set(self, dtype_fields(self, policy) | {"dtype": complex_dtype}):
                return call.run(self)  # as Flax infers it: no policy casts complex numbers
        fields = self._policy_fields(policy)
        fields |= half_safe_fields(self, fields.get("param_dtype", jnp.float32))
        fields |= {"_numerics": numerics_of(call)} if dtype is None else {"dtype": dtype}
        with fields_set(self, fields):
            return call.run(self)


def half_safe_fields(
    layer: Any, param_dtype: DTypeLike, *, defaults: bool = False
) -> dict[str, Any]:
    """Returns a layer's initialisers, made to work in half precision where its parameters are half.

    Args:
      layer: the layer.
      param_dtype: the dtype of its parameters.
      defaults: whether Flax's own defaults are among them; those of most layers run in half as they
        are.
    """
    if not is_half(param_dtype):
        return {}
    given = {
        field.name: getattr(layer, field.name)
        for field in dataclasses.fields(layer)
        if field.name.endswith("_init")
        and (defaults or getattr(layer, field.name) is not field.default)
    }
    return half_safe_inits(given, param_dtype)
