"""Parameters that a linen module creates itself, with `self.param`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from jax.typing import DTypeLike

from mpmodules.calls.own_parameters import warn_of_unknown_names
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._resolution import effective_policy, where
from policy.core.casting import cast_floating, is_floating
from policy.core.policy import Policy
from policy.core.scope import current_scope
from policy.programs import marks


def param(
    self: Any,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    unbox: bool = True,
    compute_dtype: DTypeLike | None = None,
    **init_kwargs: Any,
) -> Any:
    """Declares a parameter. Under a policy, it is stored in param_dtype.

    Args:
      name, init_fn, init_args, init_kwargs: as in `flax.linen.Module.param`. Under a policy,
        floating results of `init_fn` are stored in param_dtype.
      unbox: whether a boxed value is returned without its box. Boxed ones are returned as stored.
      compute_dtype: the dtype to read it in; None for the policy's. A policy must be in force.

    Returns:
      The parameter: float32 in code that a half-precision policy evaluates, else as stored. Its
      gradient is summed in float32 and returned in the dtype that it is stored in.
    """
    cls = type(self)
    is_kept = name in cls.keep_params
    policy = effective_policy(self, current_scope()).policy
    if policy is not None and not is_kept and not self.has_variable("params", name):
        init_fn = _cast_after(init_fn, policy)
    stored = flax_nn.Module.param(self, name, init_fn, *init_args, unbox=unbox, **init_kwargs)
    if policy is None or (not unbox and isinstance(stored, meta.AxisMetadata)):
        return stored
    if current_scope().traces_own_code:
        return jax.tree.map(lambda x: _in_trace(x, is_kept, compute_dtype), stored)
    return (
        stored if compute_dtype is None or not calls.paths else cast_floating(stored, compute_dtype)
    )


def _in_trace(value: Any, is_kept: bool, dtype: DTypeLike | None) -> Any:
    """Returns a parameter as code that is traced in float32 reads it."""
    if not is_floating(value):
        return value
    if is_kept or dtype is not None:
        return marks.read_in(value, dtype)
    return marks.returned_if_half(value)


def _cast_after(init_fn: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Returns the initialiser with its floating results, boxed ones too, in param_dtype."""
    return lambda *args, **kwargs: cast_floating(init_fn(*args, **kwargs), policy.param_dtype)


def check_names(module: Any) -> None:
    """Warns of names in `keep_params` that a module, just initialised, has no parameter of."""
    if module.is_initializing():
        warn_of_unknown_names(type(module), own_params(module), f"'{where(module)}'")


def own_params(module: Any) -> dict[str, Any]:
    """Returns the floating parameters that a bound module holds itself, as stored.

    Those of modules in it are none.
    """
    params = module.scope.variables().get("params", {})
    return {
        name: value
        for name, value in params.items()
        if not isinstance(value, Mapping) and any(map(is_floating, jax.tree.leaves(value)))
    }
