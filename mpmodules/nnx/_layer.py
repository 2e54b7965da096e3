"""The base class of our nnx layers: dtype arguments at construction, and views of a layer for a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from mpmodules._constructors import require_dtypes
from mpmodules.functional import HalfSafe, complex_input, is_half
from mpmodules.nnx._module import Module
from mpmodules.nnx._obeying import viewed as viewed
from policy.policy import Policy
from policy.precedence import Effective, with_explicit_dtypes
from policy.provenance import Source


class Layer(Module):
    """A Flax layer that obeys policies: it is built with the policy's dtypes in Flax's own arguments."""

    dtype: Any  # what Flax's constructors store
    promote_dtype: Any

    _is_layer = True
    # Whether a boundary leaves the inputs to the layer: it widens them, or looks them up, before any rounding.
    _takes_inputs_as_they_come: ClassVar[bool] = False

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Runs Flax's constructor with the policy's dtypes in its arguments, and captures the policy."""
        effective, kwargs = constructor_dtypes(self, upstream_init, policy, source, kwargs)
        upstream_init(self, *args, **kwargs)
        self._capture(effective.policy, effective.source)

    def _call_layer(
        self, crosses: bool, method: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one of Flax's own methods; `crosses` tells that the call is a boundary and returns output_dtype."""
        return method(self, *args, **kwargs)

    def _returns(self, crosses: bool) -> Any:
        """Returns the dtype of a call's result under a policy."""
        policy: Any = self.dtype_policy
        return policy.output_dtype if crosses else policy.compute_dtype


def constructor_dtypes(
    layer: Any, upstream_init: Callable[..., None], policy: Policy | None, source: Source, kwargs: dict[str, Any]
) -> tuple[Effective, dict[str, Any]]:
    """Returns the policy that a layer obeys, and its keyword arguments with the policy's dtypes put in.

    Explicit dtype arguments are noted on the layer: only here can they be told from the policy's. One that is None
    counts as not given; with no policy in force a `param_dtype` of None is float32. Initialisers given are made to work
    in half precision where parameters are half.
    """
    kwargs = dict(kwargs)
    require_dtypes(type(layer).__name__, kwargs)
    accepted = inspect.signature(upstream_init).parameters
    dtype, param_dtype = kwargs.get("dtype"), kwargs.get("param_dtype")
    if param_dtype is None:
        kwargs.pop("param_dtype", None)
    effective = with_explicit_dtypes(
        policy,
        source=source,
        dtype=dtype,
        param_dtype=param_dtype,
        what=type(layer).__name__,
        where=type(layer).__name__,
    )
    if dtype is not None:
        layer._explicit_dtype = jnp.dtype(dtype)
    if param_dtype is not None:
        layer._explicit_param_dtype = jnp.dtype(param_dtype)
    if effective.policy is not None:
        if "dtype" in accepted and effective.dtype is None:
            kwargs["dtype"] = effective.policy.compute_dtype
        if "param_dtype" in accepted and not _is_complex(param_dtype):
            kwargs["param_dtype"] = effective.policy.param_dtype
    if is_half(kwargs.get("param_dtype", jnp.float32)):
        given: dict[str, Any] = {
            name: init for name, init in kwargs.items() if _is_initialiser(name) and callable(init)
        }
        kwargs |= {name: HalfSafe(init) for name, init in given.items()}
    return effective, kwargs


def _is_initialiser(name: str) -> bool:
    return name.endswith(("_init", "_initializer")) and name != "carry_init"  # a carry's is no parameter's


def _is_complex(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def in_complex(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a view of a layer in the dtype of its complex inputs, which no policy casts; None where there are none.

    An explicit dtype argument holds.
    """
    dtype = complex_input((*args, *kwargs.values()))
    if layer.dtype_policy is None or layer._explicit_dtype is not None or dtype is None:
        return None
    return viewed(layer, dtype=dtype)
