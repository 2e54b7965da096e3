"""The rows of an estimate: policies, each with options of the user's own function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from policy.core.policy import Policy
from policy.inspect.traced.call import checked_policy, short_text

RowLike = Policy | str | None | tuple[Policy | str | None, Mapping[str, Any]]
AS_WRITTEN = "as written"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row to estimate.

    Attributes:
      name: its name in the table.
      policy: the policy to trace under; None for the policy in force.
      options: keyword arguments of the example.
    """

    name: str
    policy: Policy | None
    options: Mapping[str, Any]

    @property
    def policy_text(self) -> str:
        return "" if self.policy is None else short_text(self.policy)


def rows_of(
    policies: Sequence[RowLike] | Mapping[str, RowLike] | Policy | str,
) -> tuple[Candidate, ...]:
    """Returns the rows that `policies` asks for.

    Raises:
      TypeError: there are no rows, or an item is neither a policy nor a pair of a policy and a
        mapping.
      ValueError: two rows have one name; a text is no policy.
    """
    if isinstance(policies, (Policy, str)):
        policies = (policies,)
    if not isinstance(policies, (list, tuple, Mapping)) or not policies:
        raise TypeError(
            "policies should be a sequence of policies, or a mapping from names to them, such as "
            f"('float32', 'mixed_bfloat16'), but got {policies!r}."
        )
    items = policies.items() if isinstance(policies, Mapping) else ((None, p) for p in policies)
    found: dict[str, Candidate] = {}
    for name, item in items:
        policy, options = _divided(item)
        if name is None:
            text = AS_WRITTEN if policy is None else short_text(policy)
            name = ", ".join([text, *(f"{key}={value}" for key, value in options.items())])
        if name in found:
            raise ValueError(
                f"Two rows are named {name!r}: drop one, or give policies as a mapping from names."
            )
        found[name] = Candidate(name, policy, options)
    return tuple(found.values())


def _divided(item: Any) -> tuple[Policy | None, dict[str, Any]]:
    if not isinstance(item, tuple):
        return checked_policy(item), {}
    if len(item) != 2 or not isinstance(item[1], Mapping):
        raise TypeError(
            "An item of policies should be a policy, or a pair of a policy and a dict of options, "
            f"as in ('bfloat16', {{'master_weights': 'remainder'}}), but got {item!r}."
        )
    return checked_policy(item[0]), dict(item[1])
