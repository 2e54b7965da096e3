"""The memory that a train step is estimated to take, beside what it takes.

    python -m benchmarks.memory            # ten steps on the CPU: 3 minutes, at most 4 GiB; Linux
    python -m benchmarks.memory --check    # exits with 1 where an estimate is off by more than 10%
    python -m benchmarks.memory --on here  # on the GPU, TPU or CPU that JAX finds
    python -m benchmarks.memory --only MLP # steps whose names hold that
    python -m benchmarks.memory --small    # tiny steps, to try the programs; no bounds
    python -m benchmarks.memory --json FILE

Each step (benchmarks/memory_steps.py) is compiled from shapes and runs once, params and state
donated, in a process of its own (benchmarks/memory_job.py). `ours` is the estimate in bytes: what
the compiler plans for arguments, results that overwrite none of them, and temporaries. `measured`
is the growth of the process's peak resident memory since the step was compiled, on a GPU or TPU
that of the device's ``peak_bytes_in_use``. The note has the parts of the estimate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory_steps import STEPS
from benchmarks.table import Row, run

TARGETS = ("cpu", "here")
AT_MOST, AT_LEAST = 1.1, 0.9
GIB = 2.0**30


def chosen(only: Sequence[str]) -> list[str]:
    """Returns the steps whose names hold one of the texts; all of them for none.

    Raises:
      ValueError: a text that no name holds.
    """
    for text in only:
        if not any(text in name for name in STEPS):
            raise ValueError(f"No step is named {text!r}. Steps: {'; '.join(STEPS)}.")
    return [name for name in STEPS if not only or any(text in name for text in only)]


def in_own_process(name: str, on: str, small: bool) -> dict[str, Any]:
    """Runs a step in a fresh process, and returns the figures that it prints.

    Raises:
      RuntimeError: the process failed; the message has the end of what it said.
    """
    command = [sys.executable, "-m", "benchmarks.memory_job", name, "--on", on]
    # Arrays are allocated as they are needed, so that a device's other processes may run.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ)
    result = subprocess.run(
        [*command, *(["--small"] if small else [])],
        env=environment | ({"JAX_PLATFORMS": "cpu"} if on == "cpu" else {}),
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"The step {name!r} failed: {result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def row_of(name: str, on: str, figures: Mapping[str, Any], small: bool) -> Row:
    """Returns the row of a step. What a tiny step takes says nothing, and has no bound."""
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in figures["plan"].items())
    return Row(
        "memory",
        name,
        figures["estimated"],
        figures["measured"],
        None if small else AT_MOST,
        0.0 if small else AT_LEAST,
        note=f"GiB: {parts}",
        target=figures["device"] if on == "here" else "",
    )


def rows(small: bool, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields a row for each step and target, as it is measured.

    Raises:
      ValueError: an unknown target or step.
    """
    for target in on:
        if target not in TARGETS:
            raise ValueError(
                f"A step runs on 'cpu', or 'here' on JAX's default device, but got {target!r}."
            )
    for target in on or ("cpu",):
        for name in chosen(only):
            yield row_of(name, target, in_own_process(name, target, small), small)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the table and returns its exit status; 2 for unknown steps and targets."""
    try:
        return run(__doc__, rows, "measured", arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
