"""The base class of our linen layers, a view of which has the policy's dtypes during a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.errors import ScopeParamShapeError

from mpmodules.calls.boundary import MethodCall, Numerics
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.functions.functional import HalfSafe
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import dtype_fields, effective_policy, viewed
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
    _hook: ClassVar[str] = ""  # the attribute for an operation of the user's own, of a matmul
    _numerics: ClassVar[Numerics] = Numerics()  # in a call, an attribute: those of the policy

    _policy_fields = dtype_fields  # the dataclass fields to set for a call under a policy

    if not TYPE_CHECKING:  # type checkers see Flax's

        @flax_nn.nowrap
        def param(
            self, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any
        ) -> Any:
            """Declares a parameter; one that is stored in 8 or 4 bits is returned as codes.

            Raises:
              flax.errors.ScopeParamShapeError: codes stand for an array of another shape.
            """
            declare = functools.partial(flax_nn.Module.param, self)
            init_fn = self._half_safe(init_fn)
            options.pop("compute_dtype", None)  # the dtypes are those of the layer's fields
            stored = self.get_variable("params", name)
            if stored is None:
                made = declare(name, init_fn, *init_args, **options)
                policy = effective_policy(self, current_scope()).policy
                if calls.recorded is None:  # a summary shows what would be stored
                    require_trainable(policy, (*self.path, name), made)
                return made
            if not isinstance(stored, QuantizedArray):
                return declare(name, init_fn, *init_args, **options)
            made = jax.eval_shape(lambda: meta.unbox(init_fn(jax.random.key(0), *init_args)))
            if stored.shape != made.shape:
                raise ScopeParamShapeError(name, self.scope.path_text, stored.shape, made.shape)
            # Flax compares the shapes of codes and scales.
            return declare(name, lambda *_: stored, unbox=False).unbox_parts()

    @flax_nn.nowrap
    def _half_safe(self, init: Any) -> Any:
        """Returns an initializer that a layer with half-precision parameters was given as one that
        works there, and others as they are, such as Flax's defaults.
        """
        if jnp.dtype(self.param_dtype).itemsize >= 4:
            return init
        fields = ((vars(self).get(field.name), field) for field in dataclasses.fields(self))
        is_given = any(init is value and init is not field.default for value, field in fields)
        return HalfSafe(init) if is_given else init

    def _call_layer(self, call: MethodCall) -> Any:
        policy, dtype = call.effective.policy, call.effective.dtype
        numerics, complex_dtype = call.numerics, call.complex_dtype
        if policy is not None and dtype is None and complex_dtype is not None:
            with viewed(self, dtype_fields(self, policy) | {"dtype": complex_dtype}) as view:
                return call.run(view)  # as Flax infers it: no policy casts complex numbers
        fields = self._policy_fields(policy)
        fields |= {"_numerics": numerics} if dtype is None else {"dtype": dtype}
        with viewed(self, fields) as view:
            return call.run(view)
