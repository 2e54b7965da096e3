"""docs/tasks.md: each block runs, has as many lines as the table says, and uses only names that are
on the page that the table links.
"""

import ast
import importlib.util
import inspect
import re
from typing import NamedTuple

import flax.linen
import flax.nnx
import jax
import pytest

from tests.eight_devices import ROOT
from tests.test_docs import Block, blocks_of

DOCS = ROOT / "docs"
TEXT = (DOCS / "tasks.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \| \[.+?\]\((.+?)\) \| (\d+) \|$", TEXT, re.MULTILINE)


class Task(NamedTuple):
    """A row of the table: a task, its page, its lines of code, and the block below its heading."""

    name: str
    page: str
    lines: int
    block: Block


def task(name: str, page: str, lines: str) -> Task:
    section = TEXT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    (block,) = blocks_of(section)
    return Task(name, page, int(lines), block)


TASKS = [task(name, page, lines) for name, _, page, lines in ROWS]
CASES = [pytest.param(each, id=each.name) for each in TASKS]


def names_of_ours(code: str) -> set[str]:
    """Returns the names from our packages, and the keywords of their calls, that some code uses."""
    tree = ast.parse(code)
    modules, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name in ("policy", "mpmodules")}
        elif isinstance(node, ast.ImportFrom) and node.module in (
            *("policy", "policy.optim", "policy.testing", "mpmodules"),
        ):
            apis = {a.asname or a.name for a in node.names if a.name in ("linen", "nnx")}
            modules |= apis
            functions |= {a.name for a in node.names} - {"linen", "nnx"}
    names = set(functions)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            base = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            is_ours = isinstance(base, ast.Name) and base.id in modules | functions
            if is_ours:
                names |= {called} - {""}
                names |= {keyword.arg for keyword in node.keywords if keyword.arg}
                names -= names_of_flax(called)
    return names


def names_of_flax(called: str) -> set[str]:
    """Returns a name, and the arguments of that name in Flax, if Flax has it: users know these."""
    found = getattr(flax.linen, called, None) or getattr(flax.nnx, called, None)
    return {called, *inspect.signature(found).parameters} if callable(found) else set()


def test_there_are_ten_tasks_each_with_a_section():
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert [each.name for each in TASKS] == headings and len(TASKS) >= 10


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("each", CASES)
def test_a_task_is_solved_from_its_page_in_the_lines_that_the_table_says(each: Task):
    lines = [line for line in each.block.code.splitlines() if line.strip()]
    assert len(lines) == each.lines
    page, known = (DOCS / each.page).read_text(encoding="utf-8"), names_of_ours(each.block.code)
    assert known
    assert [name for name in sorted(known) if not re.search(rf"\b{name}\b", page)] == []


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("each", CASES)
def test_a_task_runs(each: Task):
    for package in each.block.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with jax.numpy_rank_promotion("allow"):  # as users have it
        exec(compile(each.block.code, each.name, "exec"), {"__name__": "task"})
