"""Ports files: import lines, dtypes, dynamic loss scales, and the names that nothing reads then."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import libcst as cst

from policy.porting import dtypes
from policy.porting.brackets import with_short_brackets_joined
from policy.porting.cleanup import docstring_edits, unread, unread_edits, unread_notes
from policy.porting.definitions import Project
from policy.porting.edits import Edits
from policy.porting.flow import DtypeFlow
from policy.porting.imports import ported_imports
from policy.porting.sources import (
    Elsewhere,
    ParsedFile,
    PortError,
    Written,
    has_plain_lines,
    matched_lines,
    read_file,
)
from policy.porting.syntax import is_self, last_name
from policy.porting.tidying import copy_edits, return_edits


@dataclasses.dataclass(frozen=True)
class Ported:
    """A file before and after its port."""

    name: str
    before: str
    after: str

    def diff(self) -> str:
        """Returns a unified diff: `difflib.unified_diff` pairs no lines that a file has often."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        name = self.name.lstrip("/")
        lines = [f"--- a/{name}\n", f"+++ b/{name}\n"]
        for group in matched_lines(before, after).get_grouped_opcodes():
            (_, i, _, j, _), (_, _, i_end, _, j_end) = group[0], group[-1]
            lines.append(f"@@ -{i + 1},{i_end - i} +{j + 1},{j_end - j} @@\n")
            for tag, i, i_end, j, j_end in group:
                lines += [f"{' ' if tag == 'equal' else '-'}{line}" for line in before[i:i_end]]
                lines += [f"+{line}" for line in after[j:j_end] if tag != "equal"]
        return "".join(lines)

    def deleted(self) -> int:
        """Returns the number of lines that are deleted or changed."""
        return sum(line[:1] == "-" for line in self.diff().splitlines()[2:])


def port(names: Sequence[str]) -> tuple[list[Ported], list[str]]:
    """Returns the ported files, and the lines that are left alone with their reasons.

    Raises:
      PortError: a file is not there, or is not Python.
    """
    names = list(dict.fromkeys(names))
    given = [read_file(name) for name in names]
    elsewhere = Elsewhere([source.path for source in given])
    before = [unread(source) for source in given]
    notes = [n for a, b in zip(given, before, strict=True) for n in unread_notes(a, b, elsewhere)]
    sources = [_with_text(source, ported_imports(source, notes)) for source in given]
    for pattern in (dtypes.SCALE_NAME, dtypes.DTYPE_NAME):
        flow = DtypeFlow(sources, elsewhere, pattern)
        notes += flow.notes()
        sources = _edited(sources, docstring_edits(flow.nodes, flow.edits()))
    while edits := unread_edits(sources, before, elsewhere):
        sources = _edited(sources, edits)
    sources = [_tidied(source, old.text) for source, old in zip(sources, given, strict=True)]
    for source, old in zip(sources, given, strict=True):
        if missing := _unbound(source) - _unbound(old):
            lost = ", ".join(sorted(missing))
            raise PortError(f"{source.path}: a port would leave {lost} unbound: nothing is ported")
    pairs = zip(names, given, sources, strict=True)
    return [Ported(name, a.text, b.text) for name, a, b in pairs], sorted(set(notes), key=_place)


def _tidied(source: ParsedFile, before: str) -> ParsedFile:
    if not has_plain_lines(source.text):
        return source
    for edits_of in (copy_edits, return_edits):
        if edits := edits_of(source, Written(before, source.text)):
            source = _with_text(source, edits.text(source.module))
    return _with_text(source, with_short_brackets_joined(before, source.text))


def _place(note: str) -> tuple[str, int, str]:
    path, line, text = note.split(":", 2)
    return path, int(line), text


def _unbound(source: ParsedFile) -> set[str]:
    """Returns the names, and attributes of `self` that are dtypes, that nothing binds."""
    accesses = [access for scope in source.scopes() for access in scope.accesses]
    names = {source.code(access.node) for access in accesses if not access.referents}
    project = Project([source])
    for node in project.nodes:
        name, owner = last_name(node), source.class_of(node)
        is_own = isinstance(node, cst.Attribute) and is_self(node.value)
        if is_own and re.search(dtypes.DTYPE_NAME, name) and project.owner(owner, name) is None:
            names.add(f"self.{name} of {owner}")
    return names


def _edited(sources: Sequence[ParsedFile], edits: Edits) -> list[ParsedFile]:
    return [_with_text(source, edits.text(source.module)) for source in sources]


def _with_text(source: ParsedFile, text: str) -> ParsedFile:
    """Returns a source with another text, whose lines are those of the file on disk."""
    if text == source.text:
        return source
    before, after = source.text.splitlines(), text.splitlines()
    lines = [1] * (len(after) + 2)
    for tag, i, _, j, j_end in matched_lines(before, after).get_opcodes():
        for k in range(j, j_end):
            lines[k] = source.lines[min(i + (k - j if tag == "equal" else 0), len(before) - 1)]
    try:
        return ParsedFile(source.path, text, lines)
    except PortError as error:
        raise PortError(f"a port would not parse, so nothing is ported: {error}") from None
