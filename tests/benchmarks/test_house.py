"""The files that a layer's call passes, and the state of threads, stay few."""

import re

import pytest

from benchmarks import house


def test_one_class_holds_what_a_thread_knows() -> None:
    holding = re.compile(r"\(threading\.local\)|threading\.local\(\)|ContextVar\(")
    files = house.files(*house.PACKAGES)
    found = [path for path in files if holding.search(path.read_text("utf-8"))]
    places = [path.relative_to(house.ROOT).as_posix() for path in found]
    assert places == ["policy/programs/thread.py"]


@pytest.mark.parametrize("name", ["a linen Dense", "an nnx Linear"])
def test_the_page_lists_the_files_of_a_matmul_layers_first_trace(name: str) -> None:
    page = house.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"### {name[0].upper()}{name[1:]}\n")[2].partition("\n### ")[0]
    listed = re.findall(r"^1\. `([^`]+)`", section, re.MULTILINE)
    way = house.measured(name)
    assert len(way.files) <= house.WAYS[name]["files"] and way.moves <= house.WAYS[name]["moves"]
    assert listed == way.files, "run python -m benchmarks.house --write"


def test_a_way_has_the_files_calls_and_moves_of_a_function() -> None:
    from policy.core.dtypes import cast_to_full

    way = house.way_of(lambda: cast_to_full(1.0))
    assert way.files[0] == "policy/core/dtypes.py" and way.traces == 0
    assert len(way.files) - 1 <= way.moves < way.frames


def test_a_figure_above_its_bound_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "found_sizes", lambda: {"lines of tests": 3})
    monkeypatch.setattr(house, "SIZES", {"lines of tests": (0, 2)})
    monkeypatch.setattr(house, "WAYS", {"a call": {"files": 1, "moves": 1}})
    monkeypatch.setattr(house, "measured", lambda _: house.Way(["a", "b"], 3, 1, 0))
    assert house.check() == ["lines of tests: 3, bound 2", "a call: 2 files, bound 1"]
