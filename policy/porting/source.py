"""A Python file: its text as UTF-8, its tree, and edits of the text by the tree's positions."""

from __future__ import annotations

import ast
import io
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path


class PortError(Exception):
    """A file that can't be ported: its line, or None, and the reason."""

    def __init__(self, reason: str, line: int | None = None):
        super().__init__(reason)
        self.line = line


class PythonFile:
    """A file of Python.

    Attributes:
      data: its text in UTF-8: the encoding of the positions in `tree`.
      encoding: of the file.
      parents: the parent of each node but the root.
    """

    def __init__(self, data: bytes, encoding: str = "utf-8"):
        self.data, self.encoding = data, encoding
        self.tree = parsed(data)
        lines = re.finditer(rb"[^\r\n]*(\r\n|\r|\n|$)", data)
        self.starts = [line.start() for line in lines]
        self.nodes = list(ast.walk(self.tree))
        self.parents = {c: node for node in self.nodes for c in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns where a node with a position begins and ends in `data`."""
        place: ast.expr = node  # type: ignore[assignment]  # what has a position
        assert place.end_lineno is not None and place.end_col_offset is not None
        start = self.starts[place.lineno - 1] + place.col_offset
        return start, self.starts[place.end_lineno - 1] + place.end_col_offset

    def code(self, node: ast.AST) -> str:
        """Returns the code of a node, in one line."""
        start, end = self.span(node)
        return " ".join(self.data[start:end].decode().split())

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes around a node, the innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent


def parsed(data: bytes) -> ast.Module:
    """Returns the tree of a text in UTF-8.

    Raises:
      PortError: it is not Python, or is nested too deeply for `ast`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            return ast.parse(data.decode())
    except SyntaxError as error:
        raise PortError(f"not Python: {error.msg}", error.lineno) from None
    except ValueError as error:
        raise PortError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise PortError("nested too deeply to be parsed") from None


def read_source(path: Path) -> PythonFile:
    """Reads a file of Python in the encoding that it declares.

    Raises:
      PortError: it is not a regular file, can't be read, or is not Python.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise PortError("not a regular file")
        raw = path.read_bytes()
    except OSError as error:
        is_dangling = path.is_symlink() and isinstance(error, FileNotFoundError)
        why = "a link to a file that does not exist" if is_dangling else reason(error)
        raise PortError(why) from None
    if path.suffix == ".ipynb":
        raise PortError("a notebook: save it as a .py file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise PortError(f"its encoding can't be read: {error}", 1) from None
    if text.encode(encoding) != raw:
        raise PortError(f"its encoding, {encoding}, can't be written back byte for byte", 1)
    return PythonFile(text.encode(), encoding)


def reason(error: OSError) -> str:
    """Returns the reason of an error of the file system, without the path."""
    return (error.strerror or type(error).__name__).lower()


def removed(data: bytes, start: int, end: int) -> bytes:
    """Returns a text without an argument or an imported name: with its comma, and with its line if
    it stands alone there. Brackets stay in their lines.
    """
    comma = re.compile(rb"[ \t]*,[ \t]*").match(data, end)
    after = comma.end() if comma else end
    rest = re.compile(rb"[ \t]*(#[^\r\n]*)?(\r\n|\r|\n)").match(data, after)
    line = line_start(data, start)
    kept = data[:start].rstrip(b" \t\r\n\\")
    if rest is not None and kept == data[:line].rstrip():  # alone, and not after a backslash
        return data[:line] + data[rest.end() :]
    if comma:
        is_last = rest is not None or data.startswith((b")", b"]"), after)
        return (data[:start].rstrip(b" \t") if is_last else data[:start]) + data[after:]
    if kept.endswith(b",") and b"#" not in kept[line_start(kept, len(kept)) :]:
        return kept[:-1] + data[end:]
    return data[:start] + data[end:]


def line_start(data: bytes, place: int) -> int:
    """Returns where the line of a place begins."""
    return max(data.rfind(b"\n", 0, place), data.rfind(b"\r", 0, place)) + 1
