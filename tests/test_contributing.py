"""docs/contributing.md against the tree: its names, its tables, its picture, and the tasks, done in
a copy of policy.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.eight_devices import ROOT, run_python
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


# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------


def test_every_path_of_the_page_is_in_the_tree():
    named = paths(PROSE)
    assert len(named) > 60
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links and all((PAGE.parent / link).exists() for link in links)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("policy/programs/primitives.py", "_TABLE"),
        ("policy/inspect/audit/finding_kinds.py", "FINDING_KINDS"),
        ("policy/inspect/audit/findings.py", "_CHECKS"),
        ("policy/inspect/audit/flow.py", "Flow"),
        ("policy/optim/storage_modes.py", "STORAGE_MODES StorageMode MasterWeights"),
        ("policy/optim/wrapper.py", "mixed_precision"),
        ("policy/optim/step.py", "Stepper _step"),
        ("mpmodules/linen/_layer.py", "Layer _call_layer"),
        ("mpmodules/nnx/_layer.py", "Layer _call_layer"),
        ("tests/mpmodules/table/cases.py", "Case"),
    ],
)
def test_a_file_defines_the_names_that_the_page_sends_readers_to(file, names):
    defined = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    for name in names.split():
        assert name in defined and f"`{name}`" in TEXT


def test_the_files_of_the_small_layer_are_those_that_name_it():
    section = TEXT.partition("### A layer\n")[2].partition("\n### ")[0]
    files = [*ROOT.glob("mpmodules/**/*.py*"), ROOT / "docs" / "make_layers.py"]
    naming = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if file.suffix in (".py", ".pyi") and "PReLU" in file.read_text(encoding="utf-8")
    }
    pages = {"docs/layers.md", "mpmodules/functions/activations.py"}
    tested = {path for path in paths(section) if path.startswith("tests/")}
    assert paths(section) == naming | pages | tested
    assert all("PReLU" in (ROOT / path).read_text(encoding="utf-8") for path in tested)


def test_each_command_of_the_page_is_in_the_file_that_it_runs_from():
    modules = re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", TEXT)
    assert len(set(modules)) > 5
    for module in modules:
        path = ROOT / module.replace(".", "/")
        main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert main.exists(), module
    assert "pytest -n 2 -m slow" in (ROOT / "tests/fast_part.py").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# Tables and picture
# --------------------------------------------------------------------------------------------------


def test_the_picture_and_the_table_are_those_of_the_imports():
    made = docs_script("make_house")
    graph = made.imports()
    made.require_rooms(graph)
    assert made.PICTURE.read_text("utf-8") == made.picture(graph), "run python docs/make_house.py"
    assert made.with_table(TEXT) == TEXT, "run python docs/make_house.py"


def test_every_package_is_in_the_table():
    table = {cells[0].strip("`") for cells in rows("The house")}
    assert table == directories("policy", "mpmodules") | {"examples", "benchmarks"}


def test_a_package_without_a_row_and_an_import_upwards_are_named():
    made = docs_script("make_house")
    graph = {part: set(targets) for part, targets in made.imports().items()}
    with pytest.raises(LookupError, match=r"policy/attic: give each a row in docs/make_house.py"):
        made.require_rooms(graph | {"policy/attic": set()})
    with pytest.raises(LookupError, match=r"policy/inspect/render: not in the tree"):
        made.require_rooms({part: graph[part] for part in graph if part != "policy/inspect/render"})
    wrong = graph | {"policy/core": {"policy/inspect/render"}}
    with pytest.raises(LookupError, match=r"policy/core imports policy/inspect: draw it"):
        made.require_rooms(wrong)


def test_every_directory_of_tests_is_in_the_table():
    named = {path for cells in rows("Tests") for path in re.findall(r"`([^`]+)`", cells[0])}
    assert named == directories("tests")


# --------------------------------------------------------------------------------------------------
# The tasks
# --------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A task of the page, done.

    Attributes:
      row: how its row begins.
      edits: the file, the text to replace and the text to put there; "" is a new file's text.
      program: sets `seen`.
      before, after: `seen` without and with the edits.
    """

    row: str
    edits: tuple[tuple[str, str, str], ...]
    program: str
    before: Any
    after: Any


NEW_CHECK = '''"""Sines."""

from policy.inspect.audit.finding_kinds import finding


def sines(flow):
    for node in flow.graph.nodes:
        if node.name == "sin":
            yield finding("sine", node, "A sine.")
'''
NEW_LOSS = """def absolute_error(predictions, targets):
    out = reduction_dtype_of(predictions, targets)
    return in_reduction_dtype(lambda x, y: abs(x - y), predictions, targets, dtype=out)


def squared_error("""

TASKS = (
    Task(
        "Make autocast keep `erf`",
        (
            ("policy/programs/primitives.py", "            erf: bounded\n", ""),
            (
                "policy/programs/primitives.py",
                "            erf_inv: gentle\n",
                "            erf_inv: gentle\n            erf: gentle bounded\n",
            ),
        ),
        """
from policy.programs.reading.walk import walk
fn = policy.autocast(lambda w, x: jax.lax.erf(x @ w), "mixed_bfloat16")
program = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
[erf] = [site.equation for site in walk(program) if site.name == "erf"]
seen = str(erf.invars[0].aval.dtype)
""",
        "bfloat16",
        "float32",
    ),
    Task(
        "A new finding",
        (
            ("policy/inspect/audit/checks/sines.py", "", NEW_CHECK),
            (
                "policy/inspect/audit/finding_kinds.py",
                "FINDING_KINDS = {\n",
                'FINDING_KINDS = {\n    "sine": "A sine.",\n',
            ),
            (
                "policy/inspect/audit/findings.py",
                "from policy.inspect.audit.checks.states",
                "from policy.inspect.audit.checks.sines import sines\n"
                "from policy.inspect.audit.checks.states",
            ),
            (
                "policy/inspect/audit/findings.py",
                "    sums_by_hand,\n",
                "    sums_by_hand,\n    sines,\n",
            ),
        ),
        "seen = [found.kind for found in policy.audit(jnp.sin, jnp.ones(2)).findings]",
        [],
        ["sine"],
    ),
    Task(
        "Another column in compare",
        (
            ("policy/inspect/compare/render/text.py", '"of limit")', '"of limit", "dtype")'),
            (
                "policy/inspect/compare/render/text.py",
                "        _share(row.headroom),\n",
                "        _share(row.headroom),\n        row.dtype,\n",
            ),
        ),
        """
table = str(policy.compare(lambda x: x * x, jnp.ones(2, jnp.float16)))
seen = table.splitlines()[-1].split()[-1]
""",
        "<0.01%",
        "float16",
    ),
    Task(
        "A loss",
        (
            ("policy/functions/losses.py", "def squared_error(", NEW_LOSS),
            (
                "policy/losses.py",
                "\n\n__all__ = [\n",
                "\nfrom policy.functions.losses import absolute_error as absolute_error\n\n"
                '__all__ = [\n    "absolute_error",\n',
            ),
        ),
        """
loss = getattr(policy.losses, "absolute_error", None)
seen = "" if loss is None else str(loss(jnp.ones(2, jnp.float16), jnp.ones(2, jnp.float16)).dtype)
""",
        "",
        "float32",
    ),
)
PREFACE = "import jax, jax.numpy as jnp, policy\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tasks, all done in one copy of policy: what each program sees there, by its row."""
    copy: Path = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "policy", copy / "policy", ignore=shutil.ignore_patterns("__pycache__"))
    for task in TASKS:
        for file, old, new in task.edits:
            path = copy / file
            text = path.read_text(encoding="utf-8") if old else ""
            assert text.count(old) == 1, (file, old)
            path.write_text(text.replace(old, new), encoding="utf-8")
    program = [PREFACE, "import json\nall_seen = {}\n"]
    for task in TASKS:
        program.append(f"{task.program}\nall_seen[{task.row!r}] = seen\n")
    script = copy / "tasks.py"
    script.write_text("".join(program) + "print(policy.__file__)\nprint(json.dumps(all_seen))\n")
    *_, used, seen = run_python(script, PYTHONPATH=str(copy)).splitlines()
    assert Path(used).is_relative_to(copy)
    return json.loads(seen)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.row)
def test_a_task_is_done_in_the_files_that_the_page_names(task, done):
    [cells] = [
        cells for cells in rows("Ten tasks, and where they belong") if cells[0].startswith(task.row)
    ]
    for file, old, _ in task.edits:
        assert file in TEXT or (not old and str(Path(file).parent) in TEXT)
    assert any(file.startswith(tuple(paths(cells[1]))) for file, _, _ in task.edits)
    here: dict[str, Any] = {}
    exec(compile(PREFACE + task.program, task.row, "exec"), here)
    assert (here["seen"], done[task.row]) == (task.before, task.after)


def test_there_are_ten_tasks_each_with_a_file_and_a_test():
    tasks = rows("Ten tasks, and where they belong")
    assert len(tasks) == 10
    for _, files, test in tasks:
        assert paths(files)
        assert [path for path in paths(test) if path.startswith("tests/")]
    modes = (ROOT / "tests/policy/optim/test_storage_modes.py").read_text(encoding="utf-8")
    assert "def test_a_sixth_record_is_a_mode(" in modes
    catalogue = (ROOT / "tests/test_catalogue.py").read_text(encoding="utf-8")
    assert "def test_a_new_layer_of_flaxs_is_a_gap_that_names_it(" in catalogue
