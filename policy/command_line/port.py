"""The command ``port``: diffs of ported files, or the files themselves, and notes."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from policy.command_line.arguments import CommandError, prefixed_errors


def port_files(names: Sequence[str], *, write: bool) -> None:
    """Ports files and prints their diffs and the lines that are left alone.

    Args:
      write: replaces the files, all of them or none.

    Raises:
      CommandError: LibCST is missing; a file is not there, is not Python, or can't be written.
    """
    if importlib.util.find_spec("libcst") is None:
        raise CommandError(
            "port reads Python with LibCST, which is missing: pip install 'mpmodules[port]'"
        )
    from policy.porting.port import port
    from policy.porting.sources import PortError

    try:
        ported, notes = port(names)
    except PortError as error:
        raise CommandError(str(error)) from None
    changed = [one for one in ported if one.after != one.before]
    for one in changed:
        print(one.diff(), end="" if one.diff().endswith("\n") else "\n")
    if write:
        _replace({Path(one.name): one.after for one in changed})
    if notes:
        print("\nto look at, by lines of the files as they were:", *notes, sep="\n")
    deleted = sum(one.deleted() for one in changed)
    if changed:
        verb = "written" if write else "to write with --write"
        print(f"\n{len(changed)} of {len(ported)} files {verb}; {deleted} lines deleted or changed")
    else:
        print(f"nothing to port in {', '.join(one.name for one in ported)}")


def _replace(texts: dict[Path, str]) -> None:
    """Writes all files beside the old ones, and then puts them in their places."""
    made: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with prefixed_errors(f"{str(path)!r} can't be written"):
                if not os.access(path, os.W_OK):
                    raise PermissionError("it is read-only")
                made[path] = path.with_name(f".{path.name}.ported")
                made[path].write_bytes(text.encode())
                shutil.copymode(path, made[path])
        for path, temporary in made.items():
            temporary.replace(path)
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)
