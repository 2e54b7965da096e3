"""The base classes of our nnx layers, which are built with the policy's dtypes in Flax's own
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall, Numerics
from mpmodules.nnx._call import own_params
from mpmodules.nnx._module import Module
from mpmodules.nnx._port import adopt_children
from mpmodules.nnx._resolution import dtype_arguments, in_complex, viewed
from policy.core.policy import Policy
from policy.core.scope import Source
from policy.quantized.params import require_trainable


class BuiltWithDtypes(Module):
    """Base class of layers, and of modules that take dtype arguments as layers do."""

    dtype: DTypeLike  # what Flax's constructors store
    param_dtype: Any

    _adopts_children: ClassVar[bool] = (
        False  # whether Flax's constructor makes layers, which are to obey the policy
    )

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Runs Flax's constructor with the policy's dtypes in its arguments, and captures the
        policy.
        """
        effective, kwargs = dtype_arguments(self, upstream_init, policy, source, kwargs)
        upstream_init(self, *args, **self._policy_arguments(upstream_init, kwargs))
        self._capture(effective.policy, effective.source)
        if effective.policy is not None and effective.policy.param_format is not None:
            for name, param in own_params(self):
                require_trainable(effective.policy, (type(self).__name__, name), param[...])
        if self._adopts_children:
            adopt_children(self, effective.policy)

    def _policy_arguments(
        self, upstream_init: Callable[..., None], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments for Flax's constructor, of those that have the policy's
        dtypes in them.
        """
        return kwargs


class Layer(BuiltWithDtypes):
    """A Flax layer that obeys policies."""

    promote_dtype: Any

    _is_layer = True
    # Whether a boundary leaves the inputs to the layer: it widens them, or looks them up, before
    # any rounding.
    _takes_inputs_as_they_come: ClassVar[bool] = False
    _hook: ClassVar[str] = ""  # the attribute for an operation of the user's own, of a matmul
    _numerics: Numerics = Numerics()  # in a call, those of the policy

    def _call_layer(self, call: MethodCall) -> Any:
        """Runs a method on a view of the layer that computes as the policy says."""
        view, policy = in_complex(self, call), call.policy
        computes = policy is not None and getattr(self, "dtype", None) == policy.compute_dtype
        if view is None and computes:
            view = viewed(self, _numerics=call.numerics)
        return call.run(self if view is None else view)
