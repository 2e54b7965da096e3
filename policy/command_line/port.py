"""The command ``port``: diffs of ported files, or the files themselves, and lines for a reader."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from policy.porting.port import Ported, port_file
from policy.porting.source import PortError, reason

_OBEYS = """
{arguments} dtype arguments of layers {verb}. Layers without one obey the policy in force where the
model runs, as the code around them does; without a policy they compute in the dtype of their inputs
and parameters. To see what runs in another dtype:
    python -m policy audit FILE:FUNCTION --policy mixed_bfloat16 --backward"""


def port_files(names: Sequence[str], *, write: bool) -> int:
    """Ports files, each by itself, and prints diffs, the dtypes that stay, and lines to delete.

    Args:
      names: of files, and of folders, whose `.py` files are ported.
      write: replaces the files that change.

    Returns:
      The exit status: 1 if a file was skipped.
    """
    found: list[Ported] = []
    skipped: list[str] = []
    report = _progress()
    for name in _files(names):
        try:
            one = port_file(name)
            if write and one.after != one.before:
                _replace(Path(name), one.after.encode(one.encoding))
        except PortError as error:
            line = "" if error.line is None else f":{error.line}"
            skipped.append(f"{name}{line}: {error}")
            continue
        found.append(one)
        if one.after != one.before:
            print(one.diff(), end="")
        report(len(found), sum(each.lines() for each in found[-1:]))
    _print_notes("stay", {each.name: each.stays for each in found})
    changed = [each for each in found if each.after != each.before]
    _print_notes("may be deleted by hand", {each.name: each.deletable for each in found})
    others = [each.name for each in found if not each.has_flax]
    _print_list("left alone, as they import neither flax.linen nor flax.nnx", others)
    _print_list("skipped", skipped)
    print(_summary(found, changed, write))
    return int(bool(skipped))


def _summary(found: Sequence[Ported], changed: Sequence[Ported], write: bool) -> str:
    if not changed:
        return f"nothing to port in {len(found)} files"
    verb = "written" if write else "to write with --write"
    arguments = sum(each.arguments for each in changed)
    text = _OBEYS.format(arguments=arguments, verb="are deleted" if write else "would go")
    return f"\n{len(changed)} of {len(found)} files {verb}.{text}"


def _files(names: Sequence[str]) -> Iterator[str]:
    """Yields the files of these names, and those of folders, each once."""
    seen: set[str] = set()
    for name in names:
        files = _folder(Path(name)) if Path(name).is_dir() else [name]
        for file in files:
            if (real := os.path.realpath(file)) not in seen:
                seen.add(real)
                yield file


def _folder(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*.py") if not path.is_dir())
    hidden = ((path, path.relative_to(folder).parts) for path in found)
    return sorted(str(path) for path, parts in hidden if not any(p[0] == "." for p in parts))


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in one step: the target, where the path is a link.

    Raises:
      PortError: it can't be written.
    """
    target = Path(os.path.realpath(path))
    made = None
    try:
        if not os.access(target, os.W_OK):
            raise PortError("it is read-only")
        handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        shutil.copymode(target, made)
        os.replace(made, target)
    except OSError as error:
        if made is not None:
            Path(made).unlink(missing_ok=True)
        raise PortError(f"can't be written: {reason(error)}") from None


def _print_notes(title: str, notes: Mapping[str, Mapping[str, set[int]]]) -> None:
    """Prints lines of files by their reason."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, by_reason in notes.items():
        for text, lines in by_reason.items():
            places[text].append(f"  {name}:{', '.join(map(str, sorted(lines)))}")
    if places:
        print(f"\n{title}, by lines of the files as they were:")
    for text, found in places.items():
        print(text, *found, sep="\n")


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}:", *(f"  {line}" for line in lines), sep="\n")


def _progress() -> Callable[[int, int], None]:
    """Returns a function that writes how far a port is to the standard error, once a second."""
    lines, last = 0, time.monotonic()

    def report(files: int, more: int) -> None:
        nonlocal lines, last
        lines += more
        if time.monotonic() - last > 1:
            last = time.monotonic()
            print(f"ported {files} files, {lines} lines", file=sys.stderr, flush=True)

    return report
