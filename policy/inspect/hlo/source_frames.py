"""Finds the line of the user's code that an instruction of a compiled program was made for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from policy.inspect.hlo.text import Instruction
from policy.programs.reading.source_lines import users_line

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)")


class SourceFrames:
    """The tables of stack frames at the head of a program's text.

    Args:
      text: of the program. Its instructions refer to the tables, or, of older compilers, hold a
        file and a line.
    """

    def __init__(self, text: str):
        tables = _tables(text)
        self.files = {key: row.strip('"') for key, row in tables["FileNames"].items()}
        self.functions = {key: row.strip('"') for key, row in tables["FunctionNames"].items()}
        self.locations = {key: _fields(row) for key, row in tables["FileLocations"].items()}
        self.frames = {key: _fields(row) for key, row in tables["StackFrames"].items()}
        # Frames come after their parents. XLA prints a parent's number plus one.
        parents = ((key, frame.get("parent_frame_id", 0)) for key, frame in self.frames.items())
        self.shift = 1 if any(parent >= key for key, parent in parents) else 0

    def source_of(self, instruction: Instruction) -> str:
        """Returns the line of the user's code, as ``model.py:12 (Net.__call__)``; "" if it is
        unknown.
        """
        if frame := instruction.attribute(r"stack_frame_id=(\d+)"):
            return users_line(self._outwards(int(frame)))
        file = instruction.attribute(r'source_file="([^"]*)"')
        line = instruction.attribute(r"source_line=(\d+)")
        return users_line([(file, int(line), "")]) if file and line else ""

    def _outwards(self, frame: int) -> Iterator[tuple[str, int, str]]:
        """Yields the frames from the innermost to the outermost."""
        while frame in self.frames:
            fields = self.frames[frame]
            location = self.locations.get(fields.get("file_location_id", 0), {})
            file = self.files.get(location.get("file_name_id", 0), "")
            function = self.functions.get(location.get("function_name_id", 0), "")
            if file:
                yield file, location.get("line", 0), function
            parent = fields.get("parent_frame_id", 0) - self.shift
            frame = parent if parent < frame else 0


def _tables(text: str) -> dict[str, dict[int, str]]:
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in tables:
            current = tables[line]
        elif current is not None and (row := _ROW.fullmatch(line)):
            current[int(row[1])] = row[2]
        elif line.endswith("{"):
            break
        else:
            current = None
    return tables


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
