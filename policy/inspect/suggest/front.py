"""The front of error against cost: its points and their table."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence

from policy.core.rules import PolicyRules
from policy.inspect.estimate.rows import Point, PolicyCost, is_beaten
from policy.inspect.render.table import Column, Table
from policy.inspect.suggest.patterns import code_of


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """Error and cost of a policy with one set of rules, on a target.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> from policy.inspect.suggest.front import FrontPoint
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> cost = policy.estimate(jnp.matmul, x, x, policies=["float32"], on="cpu")["float32"]
    >>> rules = policy.PolicyRules({"head": "float32"})
    >>> print(FrontPoint(rules, ("head",), 0.01, cost).code())
    rules = PolicyRules([
        ("head", "float32"),
    ])

    Attributes:
      rules: to use with the policy.
      paths: the paths that are kept in float32.
      error: relative to float32.
      cost: of the program on the target; see `policy.inspect.PolicyCost`.
      is_emulated: whether the error is that of the program with flags, not of a run in which the
        rules are applied.
    """

    rules: PolicyRules
    paths: tuple[str, ...]
    error: float
    cost: PolicyCost
    is_emulated: bool = True

    def code(self) -> str:
        """Returns the rules as Python code to paste."""
        return f"rules = {code_of(self.rules)}"

    @property
    def seconds(self) -> float:
        """Seconds of a step by the target's compiler; infinite where the program doesn't fit."""
        fits, seconds = self.cost.fits is not False, self.cost.seconds
        return math.inf if seconds is None or not fits else seconds

    @property
    def missing(self) -> int:
        """Bytes of a device's memory that the program lacks; 0 if it fits."""
        return 0 if self.cost.fits is not False else max(-(self.cost.spare or 0), 1)

    @property
    def place(self) -> Point:
        """Its cost and error; infinite where the program doesn't fit."""
        return self.seconds, self.error if math.isfinite(self.seconds) else math.inf


def unbeaten(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Returns the points that fit and that no other one beats, the cheapest first.

    Of points that are alike in error and cost, the first stays.
    """
    first: dict[Point, FrontPoint] = {}
    for point in points:
        if math.isfinite(point.seconds):
            first.setdefault(point.place, point)
    return tuple(first[place] for place in sorted(first) if not is_beaten(place, first))


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def front_lines(
    points: Sequence[FrontPoint], chosen: FrontPoint | None, target: str, timing: str, of: int
) -> list[str]:
    """Returns the table of points, as comments of Python code, and the rules of each.

    Args:
      points: the points.
      chosen: the point that has the suggestion's rules; None for none.
      target: the target's name.
      timing: where its seconds come from.
      of: the number of paths that could be kept in float32.
    """
    front = unbeaten(points)
    rows = [*front, *(point for point in points if point not in front)]
    least = min((point.seconds for point in front), default=0.0)
    seconds = [one.seconds if math.isfinite(one.seconds) else None for one in rows]
    columns = [
        Column("error", [f"{'~' * one.is_emulated}{one.error:.3g}" for one in rows]),
        Column("cycles", [one.cost.cycles for one in rows], "{:,.0f}".format),
        Column(
            "seconds",
            seconds,
            "{:.3g}".format,
            marks=[">" * one.cost.is_lower_bound for one in rows],
        ),
        Column("of least", [one and least and one / least for one in seconds], "{:.3f}".format),
        Column("float32", [f"{len(one.paths)} of {of}" for one in rows]),
        Column("", [_remark(one, front, chosen) for one in rows], side="<"),
    ]
    places = [str(i) for i in range(len(front))]
    names = places + [""] * (len(rows) - len(front))
    lines = [f"# on {target}, by {timing}:", commented(Table("", names, columns))]
    if any(point.is_emulated for point in points):
        lines.append("#    ~ measured during the search; other errors with the rules applied")
    lines += ["", "# rules of each point:"]
    for place, point in zip(places, front, strict=True):
        code = " ".join(line.strip() for line in code_of(point.rules).splitlines())
        lines.append(f"# {place}: {code}")
    return lines


def commented(table: Table) -> str:
    """Returns a table as a comment of Python code."""
    return textwrap.indent(str(table), "#")


def _remark(point: FrontPoint, front: Sequence[FrontPoint], chosen: FrontPoint | None) -> str:
    if point in front:
        return "chosen" if point == chosen else ""
    if not math.isfinite(point.seconds):
        return f"lacks {point.missing / 2**30:,.2f} GiB of memory"
    better = (i for i, other in enumerate(front) if is_beaten(point.place, [other.place]))
    place = next(better, None)
    return "no better than another" if place is None else f"beaten by {place}"
