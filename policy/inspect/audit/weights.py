"""The dtypes that a policy and its rules say for the matmuls of parameters, by path."""

from __future__ import annotations

from collections.abc import Iterator

from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.core.scope import RulesLike
from policy.inspect.audit.values import is_cotangent
from policy.programs.paths import Path, divided, joined, once
from policy.programs.reading.matmul_operands import WeightMatmul


def path_rules(rules: RulesLike | None) -> PolicyRules:
    """Returns rules by path.

    Raises:
      ValueError: a rule is about a class.
    """
    ruled = PolicyRules(rules or {}) if not isinstance(rules, PolicyRules) else rules
    for pattern, _ in ruled:
        if isinstance(pattern, type):
            raise ValueError(
                f"rules should select paths here, but one selects the class {pattern.__name__}, "
                "which a traced program does not show. Give a pattern of its paths."
            )
    return ruled


def policy_at(policy: Policy, rules: PolicyRules, path: Path) -> Policy:
    """Returns the policy of a path: that of the innermost one that a rule matches."""
    for name, model in reversed(list(names_of(path))):
        rule = rules.rule_for(name, model=model)
        if rule is not None:
            return rule[1]
    return policy


def multiplied_dtypes(policy: Policy, matmul: WeightMatmul) -> frozenset[str]:
    """Returns the dtypes of the operands of a matmul of a parameter under a policy."""
    by, is_backward = policy.matmul, is_cotangent(matmul.node)
    if by is None or (by.weight_gradient == "compute" and matmul.weight is None):
        return frozenset((policy.compute_dtype.name,))
    return frozenset((by.operands.name, *([by.gradients.name] if is_backward else [])))


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (path below the model, model's name) for a path and those above it."""
    for length in range(1, len(path) + 1):
        model, below = divided(path[:length]) or ("", path[:length])
        yield joined(once(below)), model
