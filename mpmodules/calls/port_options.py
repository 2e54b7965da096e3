"""Options of `apply_policy`, alike in both wings, and how they are checked."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

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
    own_code: Literal["autocast", "keep"]

    @property
    def beside_policy(self) -> tuple[bool | str, ...]:
        """Returns the options that change a trace beside the policy and rules, for JAX's caches."""
        return self.keep_explicit, self.own_code


def port_options(
    policy: Policy | str,
    rules: RulesLike | None,
    *,
    keep_explicit: bool,
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
    if own_code not in (None, "autocast", "keep"):
        raise ValueError(f"own_code should be 'autocast', 'keep' or None, but got {own_code!r}.")
    if own_code == "autocast" and keep_explicit:
        raise ValueError(
            "own_code='autocast' runs a model's own code in the policy's dtypes, whatever the "
            "code names: leave out keep_explicit=True, or pass own_code='keep'."
        )
    is_kept = own_code == "keep" or keep_explicit or not computes_in_half(policy, rules)
    return PortOptions(policy, rules, keep_explicit, "keep" if is_kept else "autocast")


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
