"""Markdown of the generated pages: wrapped paragraphs, tables, and where figures were measured."""

from __future__ import annotations

import importlib.metadata
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

WIDTH = 120
_PACKAGES = ("mpmodules", "jax", "flax", "optax", "torch", "libtpu", "jax-cuda12-plugin")
_KEPT = ("#", "|", "<!--", ":::")  # starts of the blocks that are not wrapped
_SPACE = "\N{NO-BREAK SPACE}"  # stands for a space that must not be broken at
_CODE = re.compile(r"`[^`\n]+`")


def wrapped(text: str) -> str:
    """Returns Markdown whose paragraphs and list items are wrapped at `WIDTH` columns.

    Headings, tables, comments and fenced code stay as they are. A span of code is not broken.

    >>> print(wrapped("Two\\nwords.\\n\\n- One\\n  item."))
    Two words.
    <BLANKLINE>
    - One item.
    """
    return "\n\n".join(_block(block) for block in _blocks(text))


def _blocks(text: str) -> Iterator[str]:
    """Yields the parts of a text between blank lines; fenced code is one part."""
    lines: list[str] = []
    fence = False
    for line in [*text.strip().splitlines(), ""]:
        fence ^= line.lstrip().startswith("```")
        if line.strip() or fence:
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []


def _block(block: str) -> str:
    if block.startswith(("```", *_KEPT)):
        return block
    items = re.split(r"^(?=- )", block, flags=re.MULTILINE)
    return "\n".join(_filled(item) for item in items if item.strip())


def _filled(text: str) -> str:
    item = text.startswith("- ")
    text = _CODE.sub(lambda span: span.group().replace(" ", _SPACE), " ".join(text.split()))
    return textwrap.fill(
        text,
        WIDTH,
        subsequent_indent="  " if item else "",
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(_SPACE, " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table whose first `left` columns are aligned to the left, and the others to the
    right.
    """
    lines = [head, [*["---"] * left, *["---:"] * (len(head) - left)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def into(page: str, part: str, name: str) -> str:
    """Returns a page with what is between the marks of a name replaced.

    Raises:
      ValueError: the page has not both marks, in their order.
    """
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, opening, rest = page.partition(start)
    _, closing, after = rest.partition(end)
    if not (opening and closing):
        raise ValueError(f"The page should have {start} and, after it, {end}.")
    return f"{before}{start}\n\n{part}\n\n{end}{after}"


def note(folder: Path, name: str) -> str:
    """Returns the text `name` of a folder of notes, without its wrapping; "" where it has none."""
    file = folder / f"{name}.md"
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def cores() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(package: str) -> str:
    """Returns the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def measured_on(environment: Mapping[str, str]) -> str:
    """Returns the sentence that says when, on which device and with which versions figures were
    measured.

    Args:
      environment: "date" and "device"; where they are known also "cores", "python" and the versions
        of packages.
    """
    number = environment.get("cores")
    where = f"{environment['device']}{f', {number} cores' if number else ''}"
    versions = {"Python": environment.get("python")} | {
        name: environment.get(name) for name in _PACKAGES
    }
    known = [
        f"{name} {version}"
        for name, version in versions.items()
        if version not in (None, "not installed")
    ]
    text = f"Measured on {environment['date']}, on {where}"
    return f"{text}, with {', '.join(known)}." if known else f"{text}."
