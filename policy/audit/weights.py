"""Matmuls of a parameter: those that a policy's ``m=`` is about."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from policy._jaxpr.dependence import PARAMETER, dependences
from policy._jaxpr.graph import Graph, Node, Value, is_joint
from policy._jaxpr.operations import kind_of
from policy._jaxpr.paths import Path, divided, once
from policy._jaxpr.primitives import ADDITIONS, CASTS, MOVES_DATA, PRODUCTS
from policy.audit.flow import bits, is_cotangent, reached
from policy.policy import Policy
from policy.rules import PolicyRules
from policy.scope import RulesLike

_AS_IT_IS = MOVES_DATA | CASTS


class WeightMatmul(NamedTuple):
    """A matmul of which one operand is made of parameters, or whose result is their gradient.

    Attributes:
      node: the matmul.
      weight: the operand that is made of parameters: 0 is the left one; None for their gradient.
    """

    node: Node
    weight: int | None


def weight_matmuls(graph: Graph, params: Collection[int]) -> Iterator[WeightMatmul]:
    """Yields the dots with parameters, forward and backward.

    Args:
      graph: the program.
      params: the places of the parameters among its arguments.
    """
    made_of = dependences(graph, params)
    for node in graph.nodes:
        if kind_of(node.name) != "dot" or len(node.inputs) < 2 or is_joint(node):
            continue
        weights = [i for i in (0, 1) if made_of[id(node.inputs[i])] == PARAMETER]
        if len(weights) == 1:
            yield WeightMatmul(node, weights[0])
        elif not weights and is_cotangent(node) and _is_gradient(node):
            yield WeightMatmul(node, None)


def are_codes(node: Node) -> bool:
    """Returns whether a matmul multiplies int8 codes of floating numbers, one operand at least."""
    return any(value.dtype == "int8" and _was_floating(value) for value in node.inputs[:2])


def _was_floating(value: Value) -> bool:
    waiting, seen = [value], {id(value)}
    while waiting:
        maker = waiting.pop().maker
        if maker is None:
            continue
        if maker.name == "convert_element_type":
            if bits(maker.inputs[0].dtype):
                return True
        elif not is_joint(maker) and maker.name not in MOVES_DATA:
            continue
        fresh = [one for one in maker.inputs if id(one) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)
    return False


def _is_gradient(node: Node) -> bool:
    """Returns whether a result is returned as it is, but for casts, scales and sums of such."""
    kept = _AS_IT_IS | PRODUCTS | ADDITIONS
    passes = lambda reader: reader.name in kept or is_joint(reader)  # noqa: E731
    return any(value.is_output for value in reached(node.outputs, passes))


# --------------------------------------------------------------------------------------------------
# The dtypes that a policy and its rules say
# --------------------------------------------------------------------------------------------------


def path_rules(rules: RulesLike | None) -> PolicyRules:
    """Returns rules by path.

    Raises:
      ValueError: a rule is about a class.
    """
    ruled = PolicyRules(rules or {}) if not isinstance(rules, PolicyRules) else rules
    for pattern, _ in ruled:
        if isinstance(pattern, type):
            raise ValueError(
                f"rules: a program does not know the class {pattern.__name__}. Give a pattern of "
                "its paths."
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
        yield "/".join(once(below)), model
