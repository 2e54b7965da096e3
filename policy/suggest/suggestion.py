"""The result of `suggest`: rules, and what was measured of each path."""

from __future__ import annotations

import dataclasses
import math

from policy.rules import PolicyRules
from policy.suggest.eight_bits import SMALLEST, LayerEvidence, lines_of
from policy.suggest.patterns import code_of
from policy.traced.call import short_text


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Measurements of one path.

    >>> from policy.suggest.suggestion import Evidence
    >>> Evidence("head", alone=0.2, cost=0.1, keeps=True).path
    'head'

    Attributes:
      path: the module path, its names joined by "/".
      alone: the error with this path alone in half precision, and everything else in float32; NaN
        if it was not measured, as where no rules are needed.
      cost: its share of the program's half-precision FLOPs plus its share of the bytes; at most 2.
      keeps: whether it is kept in float32.
    """

    path: str
    alone: float
    cost: float
    keeps: bool


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Rules that keep sensitive modules in float32; ``print(suggestion)`` shows code.

    >>> from policy import PolicyRules
    >>> from policy.suggest.suggestion import Suggestion
    >>> rules = PolicyRules({"head": "float32"})
    >>> print(Suggestion(rules, "mixed_float16", 0.1, 0.01, 0.01, 1.0, ()).code())
    rules = PolicyRules([
        ("head", "float32"),
    ])

    Attributes:
      rules: to use with the policy; empty if the policy by itself meets the budget.
      policy: its text form, the short one if it has one; "" if the function is half precision as
        written.
      budget: the requested error.
      error: the measured error with the rules applied.
      emulated: the predicted error with the rules.
      without: the predicted error without rules.
      evidence: for each path, the most sensitive first.
      of: "outputs" or "gradients".
      route: the way the rules are applied: "scope" by layers that obey it, "autocast", or "as
        written".
      runs, compilations: the numbers of runs and compilations used.
      matmul: the 8-bit matmuls that were asked for, as in ``m=``; "" for none. `policy` has ``m=``
        if any layer may run in them.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
      layers: for each layer that ``m=`` is about, the largest cost first.
    """

    rules: PolicyRules
    policy: str
    budget: float
    error: float
    emulated: float
    without: float
    evidence: tuple[Evidence, ...]
    of: str = "outputs"
    route: str = "autocast"
    runs: int = 0
    compilations: int = 0
    matmul: str = ""
    smallest: int = SMALLEST
    layers: tuple[LayerEvidence, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are kept in float32, in the order of `evidence`."""
        return tuple(evidence.path for evidence in self.evidence if evidence.keeps)

    @property
    def _besides(self) -> str:
        scales = any(layer.runs_in_8_bits for layer in self.layers)
        return f" them and m={self.matmul}" if scales else ""

    def code(self) -> str:
        """Returns the rules as Python code to paste."""
        return (
            "rules = "
            f"{code_of((str(pattern), short_text(policy)) for pattern, policy in self.rules)}"
        )

    def __str__(self) -> str:
        how = {
            "scope": f'with use_policy("{self.policy}", rules): ...',
            "autocast": f'autocast(fn, "{self.policy}", rules=rules)',
            "as written": "apply_policy(model, ..., rules), or the layers' own dtype arguments",
        }[self.route]
        lines = [
            f"# {self.of} within {self.budget:.3g} of float32: {self.error:.3g} with these rules, "
            f"{self.without:.3g} without{self._besides}",
            "from policy import PolicyRules",
            "",
            self.code(),
            f"# {how}",
            "",
            f"# {'path':<50} {'error, alone in half':>20} {'cost':>8}",
        ]
        lines += [
            f"# {e.path:<50} {'-' if math.isnan(e.alone) else format(e.alone, '.3g'):>20} "
            f"{e.cost / 2:>8.2%}{'  kept in float32' if e.keeps else ''}"
            for e in self.evidence
        ]
        return "\n".join([*lines, *lines_of(self.layers, self.matmul, self.smallest)])
