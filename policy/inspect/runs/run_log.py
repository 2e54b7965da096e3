"""The log of a run: a JSON-lines file of snapshots that is written, resumed and read."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from policy.core.messages import warn_once
from policy.inspect.monitor.snapshot import VERSION
from policy.inspect.runs.advice import Advice, RunRecord, advise
from policy.inspect.runs.text import run_text

_MOST_WAITING = 256  # snapshots that wait for their arrays, before `write` waits for the oldest
_FIELDS = frozenset(("skipped", "loss_scale", "first", "outputs", "entered", "made", "rows"))


class RunLog:
    """A JSON-lines file of the snapshots of a run, with one record in a line.

    A file that exists is continued. Records that two processes write at the same time are all
    kept.

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
      step: the step that the run resumes at, as from a checkpoint. The file's records of it and of
        later steps are replaced: readers leave them out.

    Raises:
      ValueError: the file is not a run's log, or its folder is not there.
    """

    def __init__(self, path: str | Path, *, step: int | None = None):
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"{path} can't be written: there is no folder {self.path.parent}.")
        self._waiting: collections.deque[Any] = collections.deque()
        if self.path.exists():
            read_records(self.path)  # rejects other files
            if step is not None:
                self._write_line({"version": VERSION, "restart": int(step)})

    def write(self, snapshot: Any) -> None:
        """Writes the records of a snapshot once its arrays are ready; doesn't wait for them.

        Give it the snapshot of each step: one that was not taken writes nothing. A file that can't
        be written, such as on a full disk, gives a warning.
        """
        self._waiting.append(snapshot)
        while self._waiting and (len(self._waiting) > _MOST_WAITING or _is_ready(self._waiting[0])):
            self._write_oldest()

    def flush(self) -> None:
        """Waits for the snapshots that are not ready, and writes all to the file."""
        while self._waiting:
            self._write_oldest()

    def close(self) -> None:
        """Flushes the file. A later `write` continues it."""
        self.flush()

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

    def __str__(self) -> str:
        return run_text(self.records(), self.path.name)

    def _write_oldest(self) -> None:
        for record in self._waiting.popleft().records():
            self._write_line(record)

    def _write_line(self, line: Mapping[str, Any]) -> None:
        if jax.process_index():
            return  # each process has the same records
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        try:
            with self.path.open("a+b", buffering=0) as file:
                whole = f"{text}\n".encode()
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # what was left incomplete, as on a full disk, becomes a line of its own
                    whole = whole if file.read(1) == b"\n" else b"\n" + whole
                if file.write(whole) != len(whole):
                    raise OSError("the disk is full")
        except OSError as error:
            warn_once(f"Records of the run are lost: {self.path} can't be written: {error}")


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def read_records(path: str | Path) -> list[RunRecord]:
    """Returns the records of a log, in the order of their steps, without those that were replaced.

    Lines that are no records, such as an incomplete one of a run that was killed, are left out.

    Raises:
      ValueError: there is no such file, or it has lines, and none is a record of this version.
    """
    lines = list(_lines(Path(path)))
    given = [line for line in map(_record, lines) if line]
    if not given and any(lines):
        raise ValueError(
            f"{path} has no record of a run in version {VERSION}, but {lines[0][:40]!r}. Give the "
            "file that policy.inspect.RunLog wrote."
        )
    found: list[RunRecord] = []
    for line in given:
        if "restart" in line:
            found = [one for one in found if one["step"] < line["restart"]]
        else:
            found.append(line)
    return sorted(found, key=lambda record: record["step"])


def _record(line: str) -> RunRecord | None:
    """Returns a record, or the line of a restart; None for any other line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        return None
    is_record = isinstance(record.get("step"), int) and record.keys() >= _FIELDS
    return record if is_record or isinstance(record.get("restart"), int) else None


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file that are complete and not empty."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}. Give the file that a RunLog wrote.")
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and line.strip():
                yield line


def _is_ready(snapshot: Any) -> bool:
    leaves = jax.tree.leaves(snapshot)
    return all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))
