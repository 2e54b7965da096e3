"""What docs/porting.md says of the lines of the four models: which go, which stay, and how many."""

import re

import pytest

from tests.eight_devices import ROOT
from tests.porting import recipe

PAGE = (ROOT / "docs/porting.md").read_text()
SECTIONS = dict(
    zip(*[iter(re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True)
)


@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_port_is_shorter_and_at_most_three_of_its_lines_speak_of_a_dtype(name):
    text = recipe.before(name)
    assert len(recipe.lines_that_stay(text)) <= 3
    assert recipe.lines_left_over(text) == []
    assert len(recipe.lines_that_go(text)) > 2 * len(recipe.lines_written(text)) - 1 > 0


@pytest.mark.parametrize("name", recipe.NAMES)
def test_the_diffs_of_the_page_are_parts_of_the_port_and_show_every_line_that_stays(name):
    text = recipe.before(name)
    before, after = (
        "\n" + re.sub(r"  # stays$", "", text, flags=re.MULTILINE)
        for text in (recipe.without_marks(text), recipe.ported(text))
    )
    hunks = re.findall(r"```diff\n(.*?)```", SECTIONS[name], re.DOTALL)
    for line in recipe.lines_that_stay(text):
        assert any(line in hunk for hunk in hunks), line
    assert hunks
    for hunk in hunks:
        lines = hunk.splitlines()
        assert all(line[:1] in ("-", "+", " ", "") for line in lines)
        for sign, whole in (("-", before), ("+", after)):
            part = [line[1:] for line in lines if line[:1] in (sign, " ")]
            assert _without_blanks("\n" + "\n".join(part) + "\n") in _without_blanks(whole), hunk


def _without_blanks(text: str) -> str:
    return re.sub(r"\n+", "\n", text)


def test_the_page_counts_the_lines_that_are_listed():
    listed = (ROOT / "tests/porting/lines_that_go.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `\w+\.py` \| ([\d, -]+) \| (\d+) \|$", listed, re.MULTILINE)
    totals = dict.fromkeys(recipe.NAMES, 0)
    for name, ranges, count in rows:
        ends = [list(map(int, part.split("-"))) for part in ranges.split(", ")]
        assert sum(end[-1] - end[0] + 1 for end in ends) == int(count)
        totals[name] += int(count)
    said = re.findall(r"(\d+) (?:lines )?of (\w+)", SECTIONS["The lines that go"])
    assert {name: int(count) for count, name in said} == totals


def test_the_rules_of_the_page_are_those_that_the_tests_measure():
    from tests.porting.test_ports import AS_UPSTREAM

    (rules,) = re.findall(r"^AS_UPSTREAM = (.*)$", PAGE, re.MULTILINE)
    assert eval(rules) == {path: text.format(half="bf16") for path, text in AS_UPSTREAM.items()}
