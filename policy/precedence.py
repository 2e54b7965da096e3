"""Who obeys which policy: the framework-free half. What a framework knows of a module comes in as arguments."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.policy import Policy
from policy.provenance import NO_SOURCE, Source
from policy.scope import require_usable


class DtypePolicyWarning(UserWarning):
    """A policy is in force that part of the program does not obey."""


@dataclasses.dataclass(frozen=True)
class Effective:
    """The policy that one module obeys in one call.

    Attributes:
      policy: what holds, with explicit dtype arguments put in field by field; None where no policy holds.
      base: the same before the explicit arguments: what decides whether the call is a boundary.
      source: where it comes from.
      dtype: the computation dtype that was given explicitly, where a policy can't hold it (complex); else None.
    """

    policy: Policy | None
    base: Policy | None
    source: Source
    dtype: np.dtype | None = None

    @property
    def own(self) -> bool:
        """Whether the module itself carries the policy (an argument or a rule), rather than inheriting it."""
        return self.source.own


def with_explicit_dtypes(
    base: Policy | None, *, source: Source, dtype: Any = None, param_dtype: Any = None, what: str, where: str
) -> Effective:
    """Forms the effective policy of a layer, field by field.

    An explicit `dtype` replaces compute_dtype, and the output_dtype of a layer that inherits its policy; an explicit
    `param_dtype` replaces param_dtype. Where they disagree with `base`, the layer obeys them and a
    `DtypePolicyWarning` says so, once for each `where`.

    Args:
      base: the policy that holds without the arguments, or None.
      source: where `base` comes from.
      dtype, param_dtype: the layer's own dtype arguments; None where they were not given.
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
        warn_once(
            f"{what} at '{where}' obeys its own {' and '.join(defeated)} against the policy in force, '{base}'. "
            "Delete the argument to let the policy decide, or give the layer a dtype_policy."
        )
    if defeated:
        source = dataclasses.replace(source, dtypes=", ".join(defeated))
    return Effective(policy, base, source, kept)


def _require_honourable(dtype: np.dtype, argument: str, what: str, where: str) -> None:
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{what} at '{where}' cannot honour {argument}={dtype.name} under a policy: it should be a floating dtype "
            "of at least 16 bits, such as bfloat16. 8-bit floats are for matmul operands: give the layer an 8-bit "
            "dot_general instead."
        )


_warned: set[str] = set()
_filters_then: Any = None


def warn_once(message: str) -> None:
    """Warns with a `DtypePolicyWarning`, once for each message while the same warning filters are in force."""
    global _filters_then
    if warnings.filters is not _filters_then:  # a new catch_warnings block listens afresh
        _warned.clear()
        _filters_then = warnings.filters
    if message not in _warned:
        warnings.warn(message, DtypePolicyWarning, stacklevel=2)
        _warned.add(message)
