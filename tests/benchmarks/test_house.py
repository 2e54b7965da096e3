"""The files that a layer's call passes, and the state of threads, stay few."""

import re

import pytest

from benchmarks import house


def test_three_objects_hold_what_a_thread_knows() -> None:
    holding = re.compile(r"\(threading\.local\)|threading\.local\(\)|ContextVar\(")
    files = house.files(*house.PACKAGES)
    found = [path for path in files if holding.search(path.read_text("utf-8"))]
    assert [path.relative_to(house.ROOT).as_posix() for path in found] == [
        "mpmodules/calls/boundary.py",  # one for each wing
        "policy/programs/thread.py",
    ]


@pytest.mark.parametrize("name", ["a linen Dense", "an nnx Linear"])
def test_a_matmul_layers_call_passes_at_most_ten_files_and_the_page_lists_them(name: str) -> None:
    page = house.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"### {name[0].upper()}{name[1:]}:")[2].partition("\n### ")[0]
    listed = re.findall(r"^1\. `([^`]+)`", section, re.MULTILINE)
    passed = house.files_passed(house.calls()[name])
    assert len(passed) <= 10, passed
    assert listed == passed, "run python -m benchmarks.house --write"
