"""Options of `apply_policy`, alike in both wings: those that exclude each other, and the spelling of dtype fields."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from policy.policy import Policy
from policy.rules import PolicyRules

OwnCode = Literal["autocast", "keep"] | None


def resolved_own_code(
    own_code: OwnCode,
    policy: Policy,
    rules: PolicyRules | None,
    *,
    keep_explicit: bool,
    dtype_fields: bool,
    cast_submodules: bool,
) -> OwnCode:
    """Returns `own_code`, or "keep" where there is nothing for autocast to do.

    Args:
      own_code: the argument of `apply_policy`.
      policy, rules: the port's.
      keep_explicit, dtype_fields, cast_submodules: the arguments of `apply_policy` that ask for the code's own dtypes.

    Raises:
      ValueError: options contradict each other, or `own_code` is neither None, "autocast" nor "keep".
    """
    if keep_explicit and dtype_fields:
        raise ValueError(
            "keep_explicit=True keeps the dtypes that modules were given, and dtype_fields=True replaces them; "
            "pass one of the two."
        )
    if own_code not in (None, "autocast", "keep"):
        raise ValueError(f"own_code should be 'autocast', 'keep' or None, but got {own_code!r}.")
    options = {"keep_explicit": keep_explicit, "dtype_fields": dtype_fields, "cast_submodules": cast_submodules}
    beside = [name for name, given in options.items() if given]
    if own_code == "autocast" and beside:
        raise ValueError(
            f"own_code='autocast' runs a model's own code in the policy's dtypes, whatever the code names: leave out "
            f"{beside[0]}=True, or pass own_code='keep'."
        )
    is_half = any(each.compute_dtype.itemsize < 4 for each in (policy, *(found for _, found in rules or ())))
    return own_code if is_half and not beside else "keep"


def may_be_set(value: Any) -> bool:
    """Returns whether a dtype field of a module holds a floating dtype or None: a policy decides what comes there."""
    if value is None:
        return True
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def spelled_as(value: Any, dtype: np.dtype) -> Any:
    """Returns `dtype` as a name, a scalar type or a `np.dtype`, whichever `value` is: models call and compare it."""
    if isinstance(value, str):
        return dtype.name
    return dtype if value is None or isinstance(value, np.dtype) else getattr(jnp, dtype.name)
