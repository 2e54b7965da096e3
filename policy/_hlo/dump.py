"""Reads the files that XLA writes about a program that it compiles, also where it runs out of
memory.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

_PROGRAM = "after_optimizations.txt"


@dataclasses.dataclass(frozen=True)
class Dump:
    """Texts about a compiled program.

    Attributes:
      program: its HLO, scheduled.
      allocations: where each value lies in memory.
      live_ranges: when each value is alive.
    """

    program: str = dataclasses.field(repr=False)
    allocations: str = dataclasses.field(repr=False)
    live_ranges: str = dataclasses.field(repr=False)


def dump_options(folder: str | Path) -> dict[str, str]:
    """Returns the `compiler_options` of `Lowered.compile` by which XLA writes into a folder."""
    return {"xla_dump_to": str(folder)}


def read_dump(folder: str | Path) -> Dump:
    """Reads the files of the one program that was compiled with `dump_options`.

    The TPU's compiler writes them before it raises ``RESOURCE_EXHAUSTED``, so that they say what
    takes the memory that there isn't.

    Raises:
      ValueError: the folder holds no program, several, or not all files of one.
    """
    programs = sorted(Path(folder).glob(f"*{_PROGRAM}"))
    if len(programs) != 1:
        found = ", ".join(path.name for path in programs) or "none"
        raise ValueError(
            f"{folder} should hold the files of one compiled program, but has {found}. Compile one "
            "program into an empty folder, with compiler_options={'xla_dump_to': folder}."
        )
    texts = [programs[0]]
    for ending in ("-buffer-assignment.txt", "-live-range.txt"):
        texts.append(programs[0].with_name(programs[0].name.removesuffix(".txt") + ending))
        if not texts[-1].exists():
            raise ValueError(
                f"{folder} has {programs[0].name} but no {texts[-1].name}: the compiler stopped "
                "before it assigned memory, or writes no such file."
            )
    return Dump(*(path.read_text() for path in texts))
