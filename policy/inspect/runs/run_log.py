"""The log of a run: a JSON-lines file of snapshots that is written, resumed and read."""

from __future__ import annotations

import collections
import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import jax

from policy.inspect.runs.advice import Advice, advise
from policy.inspect.runs.history import RunRecord
from policy.inspect.runs.page import run_page
from policy.inspect.runs.text import run_text

VERSION = 1
_MOST_WAITING = 256  # snapshots that wait for their arrays, before `write` waits for the oldest
_WRITERS = ("tensorboardX", "clu.metric_writers")


class RunLog:
    """A JSON-lines file of the snapshots of a run, with one record in a line.

    A file that exists is continued. A record of a step that the file is already beyond, as after
    a restart from a checkpoint, replaces the records from that step on: readers leave them out.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import policy
    >>> step = policy.monitor(lambda params, x: {"w": params["w"] - 0.01 * x}, every=1)
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> with policy.inspect.RunLog(tempfile.mkdtemp() + "/run.jsonl") as log:
    ...     for i in range(3):
    ...         params, snapshot = step(i, params, jnp.full(2, 0.01, jnp.bfloat16))
    ...         log.write(snapshot)
    >>> [(advice.kind, advice.path, advice.step) for advice in log.advice()]
    [('vanished-updates', 'w', 0)]

    Args:
      path: of the file.
      tensorboard: a folder for TensorBoard, which `tensorboardX` or `clu` writes as well.
      step: the step that the run resumes at. Records of it and of later steps are left out.

    Raises:
      ValueError: the file is not a run's log, or its folder is not there.
      ImportError: `tensorboard` is given, and neither package is installed.
    """

    def __init__(
        self, path: str | Path, *, tensorboard: str | Path | None = None, step: int | None = None
    ):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"{path} can't be written: there is no folder {self.path.parent}.")
        self._waiting: collections.deque[Any] = collections.deque()
        self._file: TextIO | None = None
        self._scalars = None if tensorboard is None else scalar_writer(tensorboard)
        if self.path.exists():
            read_records(self.path)  # refuses other files
        if step is not None and self.path.exists():
            self._write_line({"version": VERSION, "restart": int(step)})

    def write(self, snapshot: Any) -> None:
        """Writes the records of a snapshot once its arrays are ready; doesn't wait for them.

        Give it the snapshot of each step: one that was not taken writes nothing.
        """
        self._waiting.append(snapshot)
        while self._waiting and (len(self._waiting) > _MOST_WAITING or _is_ready(self._waiting[0])):
            self._write_oldest()

    def flush(self) -> None:
        """Waits for the snapshots that are not ready, and writes all to the file."""
        while self._waiting:
            self._write_oldest()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file. A later `write` opens it again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def records(self) -> list[RunRecord]:
        """Returns the records so far, in the order of their steps."""
        self.flush()
        return read_records(self.path) if self.path.exists() else []

    def advice(self) -> tuple[Advice, ...]:
        """Returns the faults of the run, the gravest first."""
        return advise(self.records())

    def to_html(self) -> str:
        """Returns the run as one self-contained HTML page."""
        return run_page(self.records(), self.path.name)

    def save(self, path: str | Path) -> None:
        """Writes the HTML page.

        Raises:
          ValueError: the file's name doesn't end with .html.
        """
        if Path(path).suffix != ".html":
            raise ValueError(f"The page of a run is saved as .html, but got {str(path)!r}.")
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def __str__(self) -> str:
        return run_text(self.records(), self.path.name)

    def _write_oldest(self) -> None:
        for record in self._waiting.popleft().records():
            self._write_line(record)
            if self._scalars is not None and jax.process_index() == 0:
                self._scalars(record["step"], dict(_scalars_of(record)))

    def _write_line(self, line: Mapping[str, Any]) -> None:
        if jax.process_index():
            return  # each process has the same records
        if self._file is None:
            self._file = _opened_at_a_line(self.path)
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()


def read_records(path: str | Path) -> list[RunRecord]:
    """Returns the records of a log, in the order of their steps, without those that were replaced.

    A last line that is not complete, as of a run that was killed or still writes, is left out.

    Raises:
      ValueError: there is no such file, or a line is not a record of this version.
    """
    found: list[RunRecord] = []
    for number, line in enumerate(_complete_lines(Path(path)), 1):
        try:
            record = json.loads(line)
            version = record["version"]
            first = record["restart"] if "restart" in record else record["step"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}: line {number} is not a record of a run, but {line[:40]!r}. Give the file "
                "that policy.inspect.RunLog wrote."
            ) from None
        if version != VERSION:
            raise ValueError(
                f"{path}: line {number} has version {version!r}, and this policy reads {VERSION}. "
                "Read it with the policy that wrote it."
            )
        while found and found[-1]["step"] >= first:
            found.pop()
        if "restart" not in record:
            found.append(record)
    return found


def _complete_lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise ValueError(f"There is no file {path}. Give the file that a RunLog wrote.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text. Give the file that a RunLog wrote.") from None
    yield from text.split("\n")[:-1]


def _opened_at_a_line(path: Path) -> TextIO:
    """Opens a file at its end, without a last line that is not complete."""
    if path.exists():
        text = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def _is_ready(snapshot: Any) -> bool:
    leaves = jax.tree.leaves(snapshot)
    return all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))


# --------------------------------------------------------------------------------------------------
# TensorBoard
# --------------------------------------------------------------------------------------------------


def scalar_writer(folder: str | Path) -> Callable[[int, Mapping[str, float]], None]:
    """Returns a function that writes the scalars of a step for TensorBoard.

    Raises:
      ImportError: neither `tensorboardX` nor `clu` is installed.
    """
    for name in _WRITERS:
        try:
            writer = importlib.import_module(name).SummaryWriter(str(folder))
        except ImportError:
            continue
        return functools.partial(_write_scalars, writer)
    raise ImportError(
        "tensorboard= writes with tensorboardX or clu, and neither is installed: "
        "pip install tensorboardX"
    )


def _write_scalars(writer: Any, step: int, scalars: Mapping[str, float]) -> None:
    if hasattr(writer, "write_scalars"):
        writer.write_scalars(step, scalars)
    else:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    writer.flush()


def _scalars_of(record: RunRecord) -> Iterator[tuple[str, float]]:
    """Yields names and values: ``update/params/head/kernel/lost``; layers of a scan apart."""
    if record["loss_scale"] is not None:
        yield "loss_scale", float(record["loss_scale"])
        yield "skipped", float(record["skipped"])
    for row in record["rows"]:
        for name, number in row["numbers"].items():
            parts = (row["kind"], row["path"], name)
            if isinstance(number, list):
                for layer, one in enumerate(number):
                    yield "/".join(filter(None, (*parts, str(layer)))), float(one)
            else:
                yield "/".join(filter(None, parts)), float(number)
