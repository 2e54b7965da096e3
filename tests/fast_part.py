"""The fast part of the suite: tests that `pytest` runs where no file and no mark is named.

`durations.txt` lists the test functions that take longer than `BUDGET` with all their cases, one a
line: seconds of one case, and the name. The fast part has as many of a function's cases as fit into
`BUDGET`, spread over their list and at least one, but none of a function whose one case takes
longer than `LONGEST`. Upstream's defects (`test_facts.py`) always have one. Of the other cases as
many are marked `slow` as fit into `SLOW_BUDGET`, at least one, and all of `PAGES`. The rest is
`exhaustive`: to be run before a release. CI runs the fast and the slow part. Functions that are not
listed are fast.

    python -m pytest -n 2                    # the fast part
    python -m pytest -n 2 -m slow            # the slow part
    python -m pytest -n 2 -m exhaustive      # the rest of the cases
    python -m pytest tests/policy/optim      # all, of the files that are named

After a change of many tests, measure again:

    python -m pytest -n 2 -m "slow or not slow" --junitxml out/tests.xml
    python -m tests.fast_part out/tests.xml
"""

import collections
import sys
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

BUDGET = 0.1  # seconds of a function, in the fast part
LONGEST = 0.5  # seconds of a case, in the fast part
SLOW_BUDGET = 2.0  # seconds of a function, in the slow part
PAGES = ("/test_docs.py::", "/test_stories.py::")  # files whose cases are the pages of docs
UNLISTED = 0.02  # seconds of a case that is not listed, about
DURATIONS = Path(__file__).with_name("durations.txt")


def durations() -> dict[str, float]:
    """Returns the seconds of one case of each function that is listed."""
    lines = (line.split(maxsplit=1) for line in DURATIONS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def within(budget: float, count: int, seconds: float) -> list[int]:
    """Returns the places of as many of `count` cases, of so many `seconds` each, as fit into a
    budget: at least one, spread over all.
    """
    fitting = min(count, max(1, int(budget / seconds)))
    return [place * count // fitting for place in range(fitting)]


def mark(items: Iterable[pytest.Item], listed: Mapping[str, float]) -> None:
    """Marks the collected cases that are not in the fast part as slow or exhaustive."""
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        if name in listed:
            seconds, is_defect = listed[name], "/test_facts.py::" in name
            has_fast = seconds <= LONGEST or is_defect
            fast = set(within(BUDGET, len(cases), seconds) if has_fast else ())
            others = [case for place, case in enumerate(cases) if place not in fast]
            budget = sys.maxsize if any(each in name for each in PAGES) else SLOW_BUDGET
            slow = set(within(budget, len(others), seconds))
            for place, case in enumerate(others):
                case.add_marker(pytest.mark.slow if place in slow else pytest.mark.exhaustive)


def longest_files_first(
    items: Iterable[pytest.Item], listed: Mapping[str, float]
) -> list[pytest.Item]:
    """Returns the cases with those of the files that take longest first, in their order."""
    seconds: dict[Path, float] = collections.defaultdict(float)
    for item in items:
        seconds[item.path] += listed.get(item.nodeid.partition("[")[0], UNLISTED)
    return sorted(items, key=lambda item: -seconds[item.path])


def measured(report: Path) -> dict[str, tuple[float, int]]:
    """Returns the seconds and the number of cases of each function in a JUnit report."""
    found: dict[str, tuple[float, int]] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        name = f"{file}.py::{case.attrib['name'].partition('[')[0]}"
        seconds, count = found.get(name, (0.0, 0))
        found[name] = seconds + float(case.attrib["time"]), count + 1
    return found


def write(found: Mapping[str, tuple[float, int]]) -> None:
    """Writes the functions that take longer than `BUDGET` in all to `durations.txt`."""
    lines = [
        f"{seconds / count:.3f} {name}\n"
        for name, (seconds, count) in sorted(found.items())
        if seconds > BUDGET
    ]
    DURATIONS.write_text("".join(lines))


if __name__ == "__main__":
    write(measured(Path(sys.argv[1])))
