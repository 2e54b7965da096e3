"""Models that were initialised under a policy, and are applied where none is in force.

Parameters say nothing of the policy that they were made under, and float32 ones work without it. So
`init` notes the policy beside the model's instance, in this process, and `apply` of the same
instance looks for it. An explicit `use_policy(None)` block around the call says that no policy is
meant.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax.numpy as jnp

from policy.core.policy import Policy
from policy.core.policy_warnings import warn_once
from policy.core.scope import current_scope

# By identity: equal models are others, and some hash nothing.
_initialised: dict[int, tuple[weakref.ref[Any], Policy]] = {}


def note_policy(model: Any) -> None:
    """Notes the policy in force beside a model that was initialised under it."""
    key, policy = id(model), current_scope().policy
    _initialised.pop(key, None)
    if policy is None or model.dtype_policy is not None or hasattr(type(model), "_ported_from"):
        return
    if {policy.param_dtype, policy.compute_dtype, policy.output_dtype} != {jnp.dtype(jnp.float32)}:
        _initialised[key] = weakref.ref(model, lambda _: _initialised.pop(key, None)), policy


def warn_where_missing(model: Any) -> None:
    """Warns of a model that is applied without the policy that it was initialised under."""
    scope, (_, policy) = current_scope(), _initialised.get(id(model), (None, None))
    is_meant = scope.traces_own_code or scope.source.kind == "scope"
    if policy is None or scope.policy is not None or is_meant:
        return
    warn_once(
        f"{type(model).__name__} was initialised under '{policy}', but is applied with no policy "
        "in force, so its layers compute as Flax's do. Call apply in the same use_policy block, or "
        "give the model a dtype_policy. If no policy is intended, call it inside use_policy(None)."
    )
