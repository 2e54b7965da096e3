"""A trainer's source files: checked, copied, and edited by ed scripts.

None of the sources is in this repository: a script has line numbers and new lines alone. `diff -e
OLD NEW` makes one, in `edits/<trainer>/<path of the file>.ed`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.trainers.model import Model

EDITS = Path(__file__).with_name("edits")
_COMMAND = re.compile(r"(\d+)(?:,(\d+))?([acd])")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A repository or package whose models are ported.

    Attributes:
      name: of its folder of sources, of its edits, results and page.
      url: to clone; of a package its page on PyPI.
      revision: the commit or version.
      files: paths of the files that are checked, and copied where no wheel has them, each with its
        sha256.
      models: imports the sources and makes the models.
      stubs: modules that the files import and the models don't need.
      wheels: pinned requirements, installed without their dependencies.
      root: the folder of the checkout that imports start from.
    """

    name: str
    url: str
    revision: str
    files: Mapping[str, str]
    models: Callable[[], Iterable[Model]]
    stubs: Sequence[str] = ()
    wheels: Sequence[str] = ()
    root: str = ""


def fetch(trainer: Trainer, checkouts: Path | None, folder: Path) -> Path:
    """Copies or installs a trainer's sources into `folder`, and checks them.

    Raises:
      ValueError: there is no checkout of it, or a file is another one.
    """
    if trainer.wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        pip += ["--ignore-requires-python", "--target", str(folder)]
        subprocess.run([*pip, *trainer.wheels], check=True)
    for path, digest in trainer.files.items():
        file = folder / path
        if not file.exists():
            if checkouts is None:
                raise ValueError(
                    f"{trainer.name} should be in a folder that --sources names: git clone "
                    f"{trainer.url}, commit {trainer.revision}."
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkouts / trainer.name / path, file)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != digest:
            raise ValueError(
                f"{path} of {trainer.name} should have sha256 {digest}, but has {found}. "
                f"Revision: {trainer.revision}."
            )
    return folder


def edited(lines: Sequence[str], script: str) -> list[str]:
    """Applies a script of `diff -e` to a file's lines.

    Raises:
      ValueError: the script has other commands than a, c and d.
    """
    result, rest = list(lines), iter(script.splitlines())
    for command in rest:
        found = _COMMAND.fullmatch(command)
        if found is None:
            raise ValueError(f"{command!r} should be a command of ed: a, c or d.")
        first, last, kind = int(found[1]), int(found[2] or found[1]), found[3]
        text = [] if kind == "d" else list(_until_dot(rest))
        result[first if kind == "a" else first - 1 : last] = text
    return result


def _until_dot(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line == ".":
            return
        yield line


@dataclasses.dataclass(frozen=True)
class Lines:
    """Counts of the lines that edits remove and add."""

    removed: int = 0
    added: int = 0


def port(trainer: Trainer, upstream: Path, folder: Path) -> Lines:
    """Copies a trainer's sources, and ports them by its edits."""
    shutil.copytree(upstream, folder)
    total = Lines()
    for script in sorted((EDITS / trainer.name).rglob("*.ed")):
        file = folder / script.relative_to(EDITS / trainer.name).with_suffix("")
        old = file.read_text().splitlines()
        new = edited(old, script.read_text())
        removed, added = changed(old, new)
        total = Lines(total.removed + removed, total.added + added)
        file.write_text("\n".join(new) + "\n")
    return total


def changed(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Returns the numbers of lines that are removed and added."""
    parts = difflib.SequenceMatcher(None, old, new).get_opcodes()
    parts = [part for part in parts if part[0] != "equal"]
    return sum(b - a for _, a, b, _, _ in parts), sum(d - c for *_, c, d in parts)
