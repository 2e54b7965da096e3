"""Options of `apply_policy`, alike in both wings: how they are checked, and the spelling of dtype
fields.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mpmodules.calls.defined_in import package_of
from policy.core.callables import shown
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.core.scope import RulesLike, computes_in_half, require_usable

OwnCode = Literal["autocast", "keep"] | None


@dataclasses.dataclass(frozen=True)
class PortOptions:
    """The arguments of `apply_policy`, checked."""

    policy: Policy
    rules: PolicyRules | None
    keep_explicit: bool
    dtype_fields: bool
    cast_submodules: bool
    own_code: OwnCode

    @property
    def beside_policy(self) -> tuple[bool | str | None, ...]:
        """Returns the options that change a trace beside the policy and rules, for JAX's caches."""
        return self.keep_explicit, self.dtype_fields, self.cast_submodules, self.own_code


def port_options(
    policy: Policy | str,
    rules: RulesLike | None,
    *,
    keep_explicit: bool,
    dtype_fields: bool,
    cast_submodules: bool,
    own_code: OwnCode,
) -> PortOptions:
    """Returns the arguments of `apply_policy`, checked.

    `own_code` is "keep" where autocast has nothing to do.

    Raises:
      ValueError: options contradict each other, `own_code` is neither None, "autocast" nor "keep",
        or the policy or the rules are malformed.
    """
    policy = require_usable(get_policy(policy))
    rules = rules if rules is None or isinstance(rules, PolicyRules) else PolicyRules(rules)
    for _, rule_policy in rules or ():
        require_usable(rule_policy)
    if keep_explicit and dtype_fields:
        raise ValueError(
            "keep_explicit=True keeps the dtypes that modules were given, and dtype_fields=True "
            "replaces them; pass one of the two."
        )
    if own_code not in (None, "autocast", "keep"):
        raise ValueError(f"own_code should be 'autocast', 'keep' or None, but got {own_code!r}.")
    options = {
        "keep_explicit": keep_explicit,
        "dtype_fields": dtype_fields,
        "cast_submodules": cast_submodules,
    }
    beside = [name for name, given in options.items() if given]
    if own_code == "autocast" and beside:
        raise ValueError(
            "own_code='autocast' runs a model's own code in the policy's dtypes, whatever the "
            f"code names: leave out {beside[0]}=True, or pass own_code='keep'."
        )
    own_code = own_code if computes_in_half(policy, rules) and not beside else "keep"
    return PortOptions(policy, rules, keep_explicit, dtype_fields, cast_submodules, own_code)


def may_be_set(value: Any) -> bool:
    """Returns whether a dtype field holds a floating dtype or None, in whose place a policy puts
    its own.
    """
    if value is None:
        return True
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def spelled_as(value: Any, dtype: np.dtype) -> Any:
    """Returns `dtype` as a name, a scalar type or a `np.dtype`, whichever `value` is: models call
    and compare it.
    """
    if isinstance(value, str):
        return dtype.name
    return dtype if value is None or isinstance(value, np.dtype) else getattr(jnp, dtype.name)


def not_a_model(given: Any, expected: str, *, other: str) -> TypeError:
    """Returns the error of an `apply_policy` that is handed something else than a model.

    Args:
      given: the argument.
      expected: the kind of model that is taken.
      other: the package whose `apply_policy` takes the models of the other wing.
    """
    if isinstance(given, type):
        return TypeError(
            f"apply_policy takes {expected} here, but got the class {given.__name__}: make an "
            "instance of it."
        )
    is_model = any(
        package_of(cls) == "flax" and cls.__name__ == "Module" for cls in type(given).__mro__
    )
    hint = f"Use {other}.apply_policy" if is_model else "Call apply_policy(model, policy)"
    return TypeError(
        f"apply_policy takes {expected} here, but got {shown(given)} of type "
        f"{type(given).__name__}. {hint}."
    )
