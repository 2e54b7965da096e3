"""The front of error against cost: sets of modules in float32, compiled for a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import code_of
from policy.inspect.suggest.search import Search, WideModules, subsets

FrontPlace = tuple[float, float]  # cost and error
_MOST_SUBSETS = 6  # the largest number of candidates of which all sets are measured


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
    def place(self) -> FrontPlace:
        return (self.seconds or 0.0, self.error) if self.fits else (math.inf, math.inf)

    def is_beaten_by(self, other: FrontPoint) -> bool:
        """Returns whether another point is better in error or in cost, and worse in neither."""
        return is_beaten(self.place, [other.place])


def is_beaten(place: FrontPlace, others: Iterable[FrontPlace]) -> bool:
    """Returns whether another place is better in one of its numbers, and worse in neither."""
    return any(other != place and other[0] <= place[0] and other[1] <= place[1] for other in others)


def unbeaten(points: Iterable[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Returns the points that fit and that no other one beats, the cheapest first.

    Of points that are alike in error and cost, the first stays.
    """
    first: dict[FrontPlace, FrontPoint] = {}
    for point in points:
        if point.fits:
            first.setdefault(point.place, point)
    return tuple(first[place] for place in sorted(first) if not is_beaten(place, first))


# --------------------------------------------------------------------------------------------------
# The sets to compile
# --------------------------------------------------------------------------------------------------


def measured_sets(search: Search) -> dict[WideModules, float]:
    """Returns sets of candidates and their errors by the program with flags.

    Of few candidates they are all sets; of more, the beginnings of `Search.order`, by the error
    that a candidate removes per cost, and whatever the search has measured.
    """
    if len(search.every) <= _MOST_SUBSETS:
        sets = list(subsets(search.every))
    else:
        order = search.order()
        sets = [frozenset(order[:count]) for count in range(len(order) + 1)]
    search.runs = max(search.runs, len(sets))
    for wide in sets:
        search.error(wide)
    return dict(search.known)


def chosen_sets(
    errors: Mapping[WideModules, float],
    costs: Sequence[float],
    count: int,
    asked: Iterable[WideModules] = (),
) -> list[WideModules]:
    """Returns at most `count` of the sets that no other one beats, far from each other.

    Args:
      errors: of each set; those of no and of all candidates, which are always chosen, are among
        them.
      costs: of each candidate.
      count: at least 2.
      asked: sets to choose after these two.
    """
    ends = [frozenset(), frozenset(range(len(costs)))]
    places = _places(errors, costs)
    chosen = list(dict.fromkeys([*ends, *asked]))[:count]
    while len(chosen) < count:
        left = {
            wide: min(math.dist(place, places[other]) for other in chosen if other in places)
            for wide, place in places.items()
            if not is_beaten(place, places.values())
        }
        farthest = max(left, key=left.__getitem__)
        if not left[farthest]:
            break
        chosen.append(farthest)
    return chosen


def _places(
    errors: Mapping[WideModules, float], costs: Sequence[float]
) -> dict[WideModules, FrontPlace]:
    """Returns the cost of each set and the logarithm of its error, each between 0 and 1."""
    finite = [error for error in errors.values() if 0 < error < math.inf] or [1.0]
    low, high = math.log(min(finite) / 2), math.log(max(finite) * 2)
    total = sum(costs) or 1.0

    def along(error: float) -> float:
        if not 0 < error < math.inf:
            return float(error > 0)
        return (math.log(error) - low) / (high - low)

    return {
        wide: (sum(costs[i] for i in wide) / total, along(error)) for wide, error in errors.items()
    }


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
    lines += [f"# {i}: {_compact(point.rules)}" for i, point in enumerate(front)]
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


def _compact(rules: PolicyRules) -> str:
    return " ".join(line.strip() for line in code_of(rules).splitlines())
