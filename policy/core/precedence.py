"""Precedence of policies, rules and dtype arguments.

Framework-free: facts about modules come in as arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.core.policy import Policy
from policy.core.policy_warnings import warn_once
from policy.core.scope import NO_SOURCE, Source, require_usable


@dataclasses.dataclass(frozen=True)
class Effective:
    """The policy that one module obeys in one call.

    Attributes:
      policy: the effective policy, with explicit dtype arguments inserted field by field; None
        without a policy.
      base: the policy before the explicit arguments; it decides whether the call is a boundary.
      source: the provenance of the policy.
      dtype: an explicit computation dtype that no policy can hold (complex); otherwise None.
    """

    policy: Policy | None
    base: Policy | None
    source: Source
    dtype: np.dtype | None = None


def with_explicit_dtypes(
    base: Policy | None,
    *,
    source: Source,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    what: str,
    where: str,
) -> Effective:
    """Returns the effective policy of a layer, formed field by field.

    An explicit `dtype` replaces compute_dtype, and also output_dtype if the layer inherits its
    policy; an explicit `param_dtype` replaces param_dtype. If they disagree with `base`, the layer
    obeys them and a `DtypePolicyWarning` is emitted, once for each `where`.

    Args:
      base: the policy that holds without the arguments, or None.
      source: the provenance of `base`.
      dtype, param_dtype: the layer's own dtype arguments; None if they were not given.
      what: the layer's class, for messages.
      where: the layer's path, for messages.

    Raises:
      ValueError: under a policy, an argument is a dtype that no layer can compute in.
    """
    if base is None:
        return Effective(None, None, NO_SOURCE)
    require_usable(base)
    changes: dict[str, Any] = {}
    kept = None
    if dtype is not None:
        explicit = jnp.dtype(dtype)
        if jnp.issubdtype(explicit, jnp.complexfloating):
            kept = explicit
        else:
            _require_honourable(explicit, "dtype", what, where)
            changes["compute_dtype"] = explicit
            if explicit != base.compute_dtype:
                changes["matmul"] = None
            if not source.own:
                changes["output_dtype"] = explicit
    if param_dtype is not None and not jnp.issubdtype(jnp.dtype(param_dtype), jnp.complexfloating):
        _require_honourable(jnp.dtype(param_dtype), "param_dtype", what, where)
        changes["param_dtype"] = jnp.dtype(param_dtype)
    policy = base.replace(**changes) if changes else base
    defeated = [
        f"{name}={jnp.dtype(given).name}"
        for name, given, field in (
            ("dtype", dtype, base.compute_dtype),
            ("param_dtype", param_dtype, base.param_dtype),
        )
        if given is not None and jnp.dtype(given) != field
    ]
    if defeated:
        verb = "overrides" if len(defeated) == 1 else "override"
        warn_once(
            f"{what} at '{where}' has an explicit {' and '.join(defeated)}, which {verb} the "
            f"policy in force, '{base}'. "
            "Delete the argument to let the policy decide, or give the layer a dtype_policy."
        )
        source = dataclasses.replace(source, dtypes=", ".join(defeated))
    return Effective(policy, base, source, kept)


def _require_honourable(dtype: np.dtype, argument: str, what: str, where: str) -> None:
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{what} at '{where}' can't use {argument}={dtype.name} under a policy: it should be a "
            "floating dtype of at least 16 bits, such as bfloat16. 8-bit floats are for matmul "
            "operands only: use a policy with m=f8 for those."
        )
