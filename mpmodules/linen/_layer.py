"""The base class of our linen layers, a view of which has the policy's dtypes during a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.errors import ScopeParamShapeError
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_written_by_user
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.functions.functional import half_safe_inits, is_half
from mpmodules.layers.matmul_calls import Numerics, numerics_of
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import dtype_fields, effective_policy, viewed
from policy.core.policy import Policy
from policy.core.scope import current_scope
from policy.quantized.array import QuantizedArray
from policy.quantized.params import require_trainable

meta.AxisMetadata.register(QuantizedArray)  # modules of others read it as they read boxes


class Layer(Module):
    """A Flax layer that obeys policies.

    Its method runs, entered once, on a view whose `dtype` and `param_dtype` fields hold the
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

    if not TYPE_CHECKING:  # type checkers see Flax's

        @flax_nn.nowrap
        def param(
            self, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any
        ) -> Any:
            """Declares a parameter; one that is stored in 8 or 4 bits is returned as codes.

            Raises:
              flax.errors.ScopeParamShapeError: codes stand for an array of another shape.
            """
            declare, stored = super().param, self.get_variable("params", name)
            if stored is None:
                made = declare(name, init_fn, *init_args, **options)
                policy = effective_policy(self, current_scope()).policy
                if calls.recorded is None:  # a summary shows what would be stored
                    require_trainable(policy, (*self.path, name), made)
                return made
            is_codes = isinstance(stored, QuantizedArray)
            if not is_codes or is_written_by_user(type(self), flax_nn.Module):
                return declare(name, init_fn, *init_args, **options)
            made = jax.eval_shape(lambda: meta.unbox(init_fn(jax.random.key(0), *init_args)))
            if stored.shape != made.shape:
                raise ScopeParamShapeError(name, self.scope.path_text, stored.shape, made.shape)
            # Flax compares the shapes of codes and scales.
            return declare(name, lambda *_: stored, unbox=False).unbox_parts()

    def _call_layer(self, call: MethodCall) -> Any:
        policy, dtype = call.policy, call.effective.dtype
        complex_dtype = call.complex_dtype
        if policy is not None and dtype is None and complex_dtype is not None:
            with viewed(self, dtype_fields(self, policy) | {"dtype": complex_dtype}) as view:
                return call.run(view)  # as Flax infers it: no policy casts complex numbers
        fields = self._policy_fields(policy)
        fields |= half_safe_fields(self, fields.get("param_dtype", jnp.float32))
        fields |= {"_numerics": numerics_of(call)} if dtype is None else {"dtype": dtype}
        with viewed(self, fields) as view:
            return call.run(view)


def half_safe_fields(
    layer: Any, param_dtype: DTypeLike, *, defaults: bool = False
) -> dict[str, Any]:
    """Returns a layer's initializers, made to work in half precision where its parameters are half.

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
