"""The result of `suggest`: rules, and what was measured of each path."""

from __future__ import annotations

import dataclasses
import math

from policy.core.rules import PolicyRules
from policy.inspect.render.table import Column, Table
from policy.inspect.suggest.front import FrontPoint, commented, front_lines, unbeaten
from policy.inspect.suggest.patterns import code_of


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Measurements of one path.

    >>> from policy.inspect.suggest.suggestion import Evidence
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
    >>> from policy.inspect.suggest.suggestion import Suggestion
    >>> rules = PolicyRules({"head": "float32"})
    >>> print(Suggestion(rules, "mixed_float16", 0.1, 0.01, 1.0, ()).code())
    rules = PolicyRules([
        ("head", "float32"),
    ])

    Attributes:
      rules: to use with the policy; empty if the policy by itself meets the budget.
      policy: its text form, the short one if it has one: the one given, or that which the model
        carries; "" if the function is half precision by dtypes of its own.
      budget: the requested error; infinite if none was given.
      error: the measured error with the rules applied.
      without: the predicted error without rules.
      evidence: for each path, the most sensitive first.
      of: "outputs" or "gradients".
      route: the way the rules are applied: "scope" by layers that obey it, "autocast", or "as
        written".
      runs: the number of runs of the search.
      target: the devices that `points` are about; "" if `suggest` was given none.
      timing: the source of their seconds: "the compiler's cycles" or "a roofline of published
        peaks".
      points: the sets of rules that were compiled for the target, with their errors and costs.
      chosen: the one of them that has `rules`, the cheapest that fits and meets the budget; None if
        none fits.
      notes: further information, in sentences.
    """

    rules: PolicyRules
    policy: str
    budget: float
    error: float
    without: float
    evidence: tuple[Evidence, ...]
    of: str = "outputs"
    route: str = "autocast"
    runs: int = 0
    target: str = ""
    timing: str = ""
    points: tuple[FrontPoint, ...] = ()
    chosen: FrontPoint | None = None
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[FrontPoint, ...]:
        """The points that fit and that no other one beats in both error and cost, the cheapest
        first.
        """
        return unbeaten(self.points)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are kept in float32, in the order of `evidence`."""
        return tuple(evidence.path for evidence in self.evidence if evidence.keeps)

    def code(self) -> str:
        """Returns the rules as Python code to paste."""
        return f"rules = {code_of(self.rules)}"

    def __str__(self) -> str:
        how = {
            "scope": f'with use_policy("{self.policy}", rules): ...',
            "autocast": f'autocast(fn, "{self.policy}", rules=rules)',
            "as written": f'apply_policy(model, "{self.policy}", rules)',
        }[self.route]
        if not self.policy:
            how = "apply_policy(model, ..., rules), or the layers' own dtype arguments"
        lines = [
            self._headline(),
            *(f"# {note}" for note in self.notes),
            "from policy import PolicyRules",
            "",
            self.code(),
            f"# {how}",
            "",
        ]
        if self.target:
            count = len(self.evidence)
            lines += front_lines(self.points, self.chosen, self.target, self.timing, count)
            lines.append("")
        return "\n".join([*lines, commented(self._table())])

    def _table(self) -> Table:
        alone = [None if math.isnan(one.alone) else one.alone for one in self.evidence]
        columns = [
            Column("error, alone in half", alone, "{:.3g}".format),
            Column("cost", [one.cost / 2 for one in self.evidence], "{:.2%}".format),
            Column("", ["kept in float32" * one.keeps for one in self.evidence], side="<"),
        ]
        return Table("path", [one.path for one in self.evidence], columns, longest=50)

    def _headline(self) -> str:
        if math.isfinite(self.budget):
            return (
                f"# {self.of} within {self.budget:.3g} of float32: {self.error:.3g} with these "
                f"rules, {self.without:.3g} without"
            )
        if self.chosen is None:
            return f"# no program fits on {self.target}"
        return (
            f"# error of {self.of}: {self.error:.3g} with these rules, those of the cheapest "
            "point; error= chooses another"
        )
