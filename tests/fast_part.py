"""The fast part of the suite: tests that `pytest` runs where no file and no mark is named.

`durations.txt` lists the test functions that take longer than `BUDGET` with all their cases, one a
line: seconds of one case, and the name. The fast part has as many of a function's cases as fit into
`BUDGET`, spread over their list and at least one, but none of a function whose one case takes
longer than `LONGEST`. Upstream's defects (`test_facts.py`) always have one. Other cases are marked
`slow`. Of functions with `MANY` short cases or more, such as layers times policies, as many are
`slow` as fit into `SLOW_BUDGET`, and the rest is `exhaustive`: to be run before a release. CI runs
the other two parts. Functions that are not listed are fast.

    python -m pytest -n 2                    # the fast part
    python -m pytest -n 2 -m slow            # the slow part
    python -m pytest -n 2 -m exhaustive      # the rest of the long tables
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
MANY = 20  # cases of a function
SHORT = 2.0  # seconds of one of its cases
SLOW_BUDGET = 4.0  # seconds of a function with so many short cases, in the slow part
UNLISTED = 0.02  # seconds of a case that is not listed, about
DURATIONS = Path(__file__).with_name("durations.txt")


def durations() -> dict[str, float]:
    """Returns the seconds of one case of each function that is listed."""
    lines = (line.split(maxsplit=1) for line in DURATIONS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def fast_cases(count: int, seconds: float, *, keeps_one: bool = False) -> list[int]:
    """Returns the places of a function's fast cases among `count`, of so many `seconds` each."""
    if seconds > LONGEST and not keeps_one:
        return []
    fitting = min(count, max(1, int(BUDGET / seconds)))
    return [place * count // fitting for place in range(fitting)]


def slow_cases(count: int, seconds: float) -> list[int]:
    """Returns the places of a function's slow cases among the `count` that are not fast."""
    is_long_table = count >= MANY and seconds < SHORT
    fitting = min(count, max(1, int(SLOW_BUDGET / seconds))) if is_long_table else count
    return [place * count // fitting for place in range(fitting)]


def mark(items: Iterable[pytest.Item], listed: Mapping[str, float]) -> None:
    """Marks the collected cases that are not in the fast part as slow or exhaustive."""
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        if name in listed:
            is_defect = "/test_facts.py::" in name
            fast = set(fast_cases(len(cases), listed[name], keeps_one=is_defect))
            others = [case for place, case in enumerate(cases) if place not in fast]
            slow = set(slow_cases(len(others), listed[name]))
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
