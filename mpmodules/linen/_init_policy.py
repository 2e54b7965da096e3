"""Models that were initialised under a policy, and are applied where none is in force.

Parameters say nothing of the policy that they were made under, and float32 ones work without it. So
`init` notes the policy beside the model's instance, in this process, and `apply` of the same
instance looks for it. An explicit `use_policy(None)` block around the call says that no policy is
meant.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mpmodules.linen._calls import calls
from policy.core.policy import Policy
from policy.core.precedence import warn_once
from policy.core.provenance import source_in_force
from policy.core.scope import current_scope

# By identity: equal models are others, and some hash nothing.
_initialised: dict[int, tuple[weakref.ref[Any], Policy]] = {}


def noting_policy(init_with_output: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Flax's `init_with_output`, which `init` calls too, so that it notes the policy in
    force.
    """

    @functools.wraps(init_with_output)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = init_with_output(self, *args, **kwargs)
        if calls.recorded is None:  # a summary's init makes no parameters
            _note(self)
        return made

    return call


def missing_policy(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Flax's `apply`, so that it warns of a policy that is no longer in force."""

    @functools.wraps(apply)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _initialised:
            _warn_where_missing(self)
        return apply(self, *args, **kwargs)

    return call


def _note(model: Any) -> None:
    policy = None if _carries_policy(model) else current_scope().policy
    if policy is None or _is_float32(policy):
        _initialised.pop(id(model), None)
    else:
        key = id(model)
        _initialised[key] = weakref.ref(model, lambda _: _initialised.pop(key, None)), policy


def _carries_policy(model: Any) -> bool:
    return model.dtype_policy is not None or hasattr(type(model), "_ported_from")


def _is_float32(policy: Policy) -> bool:
    return {policy.param_dtype, policy.compute_dtype, policy.output_dtype} == {
        jnp.dtype(jnp.float32)
    }


def _warn_where_missing(model: Any) -> None:
    scope, (_, policy) = current_scope(), _initialised[id(model)]
    if scope.policy is not None or scope.traces_own_code or source_in_force().kind == "scope":
        return
    warn_once(
        f"{type(model).__name__} was initialised under '{policy}', but is applied with no policy "
        "in force, so its layers compute as Flax's do. Call apply in the same use_policy block, or "
        "give the model a dtype_policy. If no policy is intended, call it inside use_policy(None)."
    )
