"""docs/contributing.md against the tree: its names, its tables, its picture and its tasks."""

import re

import pytest

from tests.eight_devices import ROOT
from tests.scripts import docs_script

PAGE = ROOT / "docs" / "contributing.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)


def paths(text: str) -> set[str]:
    """Returns the files and directories that a text names in code."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {each for each in spans if re.fullmatch(r"[\w.*/-]*(/[\w.*-]+|\.(py|md|txt))", each)}


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of a section's table, without its head."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def directories(*roots: str) -> set[str]:
    """Returns the directories below `roots` that hold files, without caches."""
    files = (file for root in roots for file in (ROOT / root).rglob("*") if file.is_file())
    folders = {file.parent.relative_to(ROOT).as_posix() for file in files}
    return {folder for folder in folders if "__pycache__" not in folder}


def test_every_path_of_the_page_is_in_the_tree():
    named = paths(PROSE)
    assert len(named) > 50
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def test_each_command_of_the_page_is_in_the_file_that_it_runs_from():
    modules = re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", TEXT)
    assert len(set(modules)) > 5
    for module in modules:
        path = ROOT / module.replace(".", "/")
        main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert main.exists(), module


@pytest.mark.slow
def test_the_picture_and_the_table_are_those_of_the_imports():
    made = docs_script("make_house")
    graph = made.imports()
    made.require_rooms(graph)
    assert made.PICTURE.read_text("utf-8") == made.picture(graph), "run python docs/make_house.py"
    assert made.with_table(TEXT) == TEXT, "run python docs/make_house.py"


def test_every_directory_of_tests_mirrors_a_package_or_is_in_the_table():
    named = {path for cells in rows("Tests") for path in re.findall(r"`([^`]+)`", cells[0])}
    found = directories("tests")
    assert named <= found
    mirrored = directories("policy", "mpmodules", "examples", "benchmarks")
    unnamed = {path.removeprefix("tests/") for path in found - named}
    assert unnamed - mirrored == set()


def test_each_task_has_a_file_and_a_test():
    section = TEXT.partition("\n### Other tasks\n")[2].partition("\n## ")[0]
    tasks = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    assert len(tasks) > 5
    for _, files, test in tasks[1:]:
        assert paths(files)
        assert [path for path in paths(test) if path.startswith("tests/")]
    modes = (ROOT / "tests/policy/optim/test_storage_modes.py").read_text(encoding="utf-8")
    assert "def test_another_record_is_a_mode(" in modes
