"""The code of each page below docs/ runs, and prints the output that the page shows.

The python blocks of a page are one program, in a process of its own. A ``text`` block that follows
one directly is its output, compared with figures and spaces masked. ``<!-- needs: keras -->``
before a block leaves it out where the package is missing; ``<!-- slow -->`` marks a page's test.
Commands name programs and options that are there, and so are links and pictures of a page.
"""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from policy.command_line.command import _parser
from tests.eight_devices import ROOT, run_python

FENCE = re.compile(
    r"(?:^[ ]*<!-- needs: (?P<needs>[\w ]+) -->\n\n?)?"
    r"^(?P<indent>[ ]*)```(?P<kind>python|text)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
MARK = "---- block {} ----"


class Block(NamedTuple):
    """A python block of a page: its code, the packages that it needs, the output that is shown."""

    code: str
    needs: tuple[str, ...]
    output: str | None


def blocks_of(text: str) -> list[Block]:
    """Returns the python blocks of a page's text, each with the output that follows it."""
    blocks: list[Block] = []
    end = 0
    for found in FENCE.finditer(text):
        code = re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        if found["kind"] == "python":
            blocks.append(Block(code, tuple((found["needs"] or "").split()), None))
        elif blocks and not text[end : found.start()].strip():
            blocks[-1] = blocks[-1]._replace(output=code)
        end = found.end()
    return blocks


def masked(text: str) -> str:
    """Returns a text with its numbers, units of sizes, rules of tables and spaces made alike."""
    text = re.sub(r"[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "#", text)
    text = re.sub(r"# (?:[KMGT]i)?B\b", "# B", text)
    return " ".join(re.sub(r"[-─━=]{2,}", "--", text).split())


PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("docs/**/*.md"))
}
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if "<!-- slow -->" in text else [])
    for name, text in PAGES.items()
    if blocks_of(text)
]


@pytest.mark.slow
@pytest.mark.parametrize("page", CASES)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page: str, tmp_path: Path):
    blocks = blocks_of(PAGES[page])
    missing = [any(importlib.util.find_spec(need) is None for need in b.needs) for b in blocks]
    program = tmp_path / page.replace("/", "_").replace(".md", ".py")
    lines = []
    for place, block in enumerate(blocks):
        compile(block.code, f"{page}, block {place}", "exec")
        # Each block of the tasks is a program of its own.
        code = f"exec({block.code!r}, {{}})" if page == "tasks.md" else block.code
        lines += [f"print({MARK.format(place)!r})", "pass" if missing[place] else code]
    program.write_text("\n".join(lines), encoding="utf-8")
    result = run_python(
        "-P",  # a page may be named as a package is
        "-W",
        "error",
        program,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",  # programs are compiled in two thirds of the time
        JAX_NUMPY_DTYPE_PROMOTION="strict",
        JAX_NUMPY_RANK_PROMOTION="raise",
    )
    printed = re.split(r"---- block \d+ ----\n", result)[1:]
    assert len(printed) == len(blocks)
    for place, block in enumerate(blocks):
        if block.output is not None and not missing[place]:
            assert masked(printed[place]) == masked(block.output), f"block {place}"


def test_blocks_are_found_in_tabs_with_their_packages_and_outputs():
    page = (
        "# Page\n\n:::{tab-item} linen\n<!-- needs: keras jmp -->\n```python\nprint(1)\n```\n:::\n"
        "\n```text\n1\n```\n\n- item\n\n  ```python\n  if True:\n      print(2)\n  ```\n\n"
        "  ```text\n  2\n  ```\n"
    )
    assert blocks_of(page) == [
        Block("print(1)\n", ("keras", "jmp"), None),
        Block("if True:\n    print(2)\n", (), "2\n"),
    ]
    assert masked("a  1.25e-3\n----- -4") == masked("a 3 -- 7") != masked("b 3 -- 7")


COMMANDS = {
    (page, " ".join(command.split()))
    for page, text in {**PAGES, "README.md": (ROOT / "README.md").read_text("utf-8")}.items()
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)
    for command in re.findall(r"^(?:\$ )?(python .*)$", block.replace("\\\n", ""), re.MULTILINE)
}


def is_command_of_policy(command: str) -> bool:
    """Returns whether a command is one that the parser of `python -m policy` takes."""
    words = shlex.split(command, comments=True)
    if words[:3] != ["python", "-m", "policy"]:
        return False
    return callable(_parser().parse_args(words[3:]).run)


@pytest.mark.parametrize(("page", "command"), sorted(COMMANDS))
def test_a_command_of_a_page_names_a_program_and_options_that_it_has(page: str, command: str):
    """Commands are not run: many take minutes, and their targets are a user's own."""
    words = shlex.split(command, comments=True)
    if is_command_of_policy(command):
        return
    if words[1] != "-m":
        program = (ROOT / words[1]).read_text("utf-8")
    elif words[2].startswith(("benchmarks", "tests")):
        found = importlib.util.find_spec(words[2])
        assert found and found.origin
        package = Path(found.origin).parent
        program = "".join(file.read_text("utf-8") for file in package.rglob("*.py"))
    else:
        return
    for option in (word for word in words if re.match("--[a-z]", word)):
        name = option.split("=")[0]
        assert re.search(rf"['\"]{name}\b|\b{name[2:].replace('-', '_')}\b", program), name


def test_the_help_of_each_command_has_an_example_that_it_takes():
    parser = _parser()
    (commands,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    for help_text in [parser.format_help(), *(each.format_help() for each in commands.values())]:
        joined = help_text.replace("\\\n", "")
        examples = re.findall(r"^    (python -m policy (?!COMMAND).*)$", joined, re.MULTILINE)
        assert examples and all(map(is_command_of_policy, examples))


def test_each_option_of_a_directive_has_a_line_of_its_own():
    joined = re.compile(r"^ *:[a-z-]+: .* :[a-z-]+:", re.MULTILINE)
    for page, text in PAGES.items():
        assert joined.findall(text) == [], page


IMAGE = re.compile(r"!\[(.*?)\]\((?!https?:)([^)\s]+)\)", re.DOTALL)
SHOWN = {
    (page.parent / name).resolve(): text
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for text, name in IMAGE.findall(page.read_text("utf-8"))
}


@pytest.mark.parametrize("picture", SHOWN, ids=lambda picture: picture.name)
def test_a_picture_is_there_and_small_and_its_text_says_what_it_shows(picture: Path):
    assert picture.is_file()
    assert picture.stat().st_size < 150_000
    assert len(SHOWN[picture].split()) >= 6


def anchors_of(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as forges and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.cases(fast=9)
@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_the_links_of_a_page_lead_somewhere(page: str):
    """A package index gets the README's as absolute links; pyproject.toml says how."""
    path = ROOT / "docs" / page
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("http"):
            assert re.match(r"https?://[\w.-]+\.[a-z]+(/|$)", target), target
            continue
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), f"{target}#{anchor}"
