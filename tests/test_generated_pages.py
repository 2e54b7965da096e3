"""The generated pages: each is made of stored results by its command, and its prose is wrapped."""

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from benchmarks import accuracy, convergence, performance
from benchmarks import page as benchmarks_page
from benchmarks.estimates import page as estimates_page
from benchmarks.markdown import WIDTH
from tests.eight_devices import ROOT
from tests.scripts import docs_script

DOCS = ROOT / "docs"
SHORT = 40


gallery = docs_script("make_gallery")


class Page(NamedTuple):
    make: Callable[[], str]
    command: str
    machine: str = "Measured on 20"


PAGES = {
    "accuracy.md": Page(
        lambda: accuracy.page(accuracy.stored()), "python -m benchmarks.accuracy --write"
    ),
    "benchmarks.md": Page(
        lambda: benchmarks_page.markdown(benchmarks_page.stored()), "python -m benchmarks --write"
    ),
    "convergence.md": Page(
        lambda: convergence.page(convergence.stored()),
        "python -m benchmarks.convergence --write",
    ),
    "estimates.md": Page(
        estimates_page.page,
        "python -m benchmarks estimates --write",
        "Compiled on an x86 Linux machine",
    ),
    "performance.md": Page(
        performance.page, "python -m benchmarks.performance", "run on an x86 machine with two cores"
    ),
    "gallery.md": Page(
        lambda: gallery.page(json.loads(gallery.STORED.read_text("utf-8"))),
        "python docs/make_gallery.py",
    ),
}


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yields the lines of each paragraph and list item, without code, tables and headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        lines = block.strip("\n").split("\n")
        if block.strip() and not lines[0].startswith(("|", "#", "<!--", "![")):
            yield lines


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_the_stored_results_and_its_prose_is_wrapped(name: str):
    page, text = PAGES[name], (DOCS / name).read_text(encoding="utf-8")
    assert text == page.make(), f"run the command of docs/{name} with --stored"
    assert page.command in text and page.machine in " ".join(text.split())
    found = list(paragraphs(text))
    assert len(found) > 5
    for lines in found:
        assert [line for line in lines if len(line) > WIDTH] == []
        assert [line for line in lines[:-1] if len(line) < SHORT] == []
    code = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", code.sub("", text), re.MULTILINE)) == 1


def test_the_gallery_has_every_example_with_its_picture():
    files = {file.stem for file in ROOT.glob("examples/*.py")} - {"__init__"}
    assert {example.name for example in gallery.EXAMPLES} == files
    stored = json.loads(gallery.STORED.read_text("utf-8"))
    for example in gallery.EXAMPLES:
        assert stored["examples"][example.name]["command"] == example.command
        assert stored["examples"][example.name]["output"]
        picture = gallery.picture_of(example)
        assert picture.exists() == bool(example.picture)
        assert not example.picture or picture.stat().st_size < gallery.LARGEST + 1
    assert sum(one["seconds"] for one in stored["examples"].values()) < 1200
