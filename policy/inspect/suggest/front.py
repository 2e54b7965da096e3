"""The front of error against cost: its points and their table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from policy.core.rules import PolicyRules
from policy.inspect.estimate.rows import Point, is_beaten
from policy.inspect.suggest.patterns import code_of


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """Error and cost of a policy with one set of rules, on a target.

    >>> from policy import PolicyRules
    >>> from policy.inspect.suggest.front import FrontPoint
    >>> rules = PolicyRules({"head": "float32"})
    >>> point = FrontPoint(rules, ("head",), error=0.01, cycles=1500.0, seconds=1e-6, exchange=0.0)
    >>> print(point.code())
    rules = PolicyRules([
        ("head", "float32"),
    ])

    Attributes:
      rules: to use with the policy.
      paths: the paths that are kept in float32.
      error: relative to float32.
      cycles: the compiler's estimate; None where it gives none, or where the program doesn't fit.
      seconds: of the kernels, and of the exchanges where those are known; None where the program
        doesn't fit.
      exchange: seconds of the exchanges among them; None where the bandwidth of the links is not
        published.
      missing: bytes of a device's memory that the program lacks; 0 if it fits.
      is_emulated: whether the error is that of the program with flags, not of a run in which the
        rules are applied.
      is_lower_bound: whether `seconds` leaves something out: exchanges, or kernels without an
        estimate.
    """

    rules: PolicyRules
    paths: tuple[str, ...]
    error: float
    cycles: float | None
    seconds: float | None
    exchange: float | None
    missing: int = 0
    is_emulated: bool = True
    is_lower_bound: bool = False

    def code(self) -> str:
        """Returns the rules as Python code to paste."""
        return f"rules = {code_of(self.rules)}"

    @property
    def fits(self) -> bool:
        """True if the program fits into a device's memory, so that its time is known."""
        return self.seconds is not None and not self.missing

    @property
    def place(self) -> Point:
        """Its cost and error."""
        return (self.seconds or 0.0, self.error) if self.fits else (math.inf, math.inf)

    def is_beaten_by(self, other: FrontPoint) -> bool:
        """Returns whether another point is better in error or in cost, and worse in neither."""
        return is_beaten(self.place, [other.place])


def unbeaten(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Returns the points that fit and that no other one beats, the cheapest first.

    Of points that are alike in error and cost, the first stays.
    """
    first: dict[Point, FrontPoint] = {}
    for point in points:
        if point.fits:
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
    least = min((point.seconds or 0.0 for point in points if point.fits), default=0.0)
    lines = [
        f"# on {target}, by {timing}:",
        f"# {'':>2} {'error':>9} {'cycles':>14} {'seconds':>10} {'of least':>9} {'float32':>9}",
    ]
    for place, point in enumerate(front):
        said = "  chosen" if point == chosen else ""
        lines.append(f"# {place:>2} {_figures(point, least, of)}{said}")
    for point in points:
        if point not in front:
            lines.append(f"# {'':>2} {_figures(point, least, of)}  {_remark(point, front)}")
    if any(point.is_emulated for point in points):
        lines.append("#    ~ measured during the search; other errors with the rules applied")
    lines += ["", "# rules of each point:"]
    for i, point in enumerate(front):
        code = " ".join(line.strip() for line in code_of(point.rules).splitlines())
        lines.append(f"# {i}: {code}")
    return lines


def _figures(point: FrontPoint, least: float, of: int) -> str:
    error = f"{'~' if point.is_emulated else ''}{point.error:.3g}"
    cycles = "-" if point.cycles is None else f"{point.cycles:,.0f}"
    bound = ">" if point.is_lower_bound else ""
    seconds = "-" if point.seconds is None else f"{bound}{point.seconds:.3g}"
    ratio = f"{point.seconds / least:.3f}" if point.seconds is not None and least else "-"
    kept = f"{len(point.paths)} of {of}"
    return f"{error:>9} {cycles:>14} {seconds:>10} {ratio:>9} {kept:>9}"


def _remark(point: FrontPoint, front: Sequence[FrontPoint]) -> str:
    if not point.fits:
        return f"lacks {point.missing / 2**30:,.2f} GiB of memory"
    better = next((i for i, other in enumerate(front) if point.is_beaten_by(other)), None)
    return "no better than another" if better is None else f"beaten by {better}"
