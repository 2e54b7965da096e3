"""Writes the reports of a command to files and the standard output."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from policy.command_line.target import CommandError
from policy.inspect.estimate.report import Estimate


def write_text(name: str, contents: Callable[[], str]) -> None:
    """Writes a text to a file.

    Raises:
      CommandError: it can't be written.
    """
    _writing(name, lambda: Path(name).write_text(contents(), encoding="utf-8"))


def require_one_output(html: str | None, json: str | None) -> None:
    """Refuses two reports on the standard output.

    Raises:
      CommandError: both names are "-".
    """
    if html == json == "-":
        raise CommandError(
            "--json - and --html - both take the standard output: give one of them a file."
        )


def require_outputs(html: str | None, json: str | None, plot: str | None, count: int) -> None:
    """Refuses files that could not be written, before there is anything to write.

    Args:
      html, json, plot: names of files, or "-" for the standard output.
      count: of the targets that are estimated.

    Raises:
      CommandError: a folder is not there, a file is a folder, a plot has another ending or no
        matplotlib, or several reports share the standard output.
    """
    require_one_output(html, json)
    if "-" in (html, json) and count > 1:
        raise CommandError(
            f"--json - and --html - print one report, but --on has {count} targets: give a file."
        )
    if plot is not None and Path(plot).suffix not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--plot {plot!r} should end in .png, .svg or .pdf.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot draws with matplotlib, which is missing: pip install matplotlib")
    for name in (html, json, plot):
        if name is not None and name != "-":
            if not Path(name).parent.is_dir():
                raise CommandError(
                    f"{name} can't be written: there is no folder {Path(name).parent}."
                )
            if Path(name).is_dir():
                raise CommandError(f"{name or repr(name)} can't be written: it is a folder.")


def write_estimate(
    estimate: Estimate, *, html: str | None, json: str | None, plot: str | None, is_one: bool = True
) -> None:
    """Prints an estimate, or its report for the standard output, and writes the files.

    Args:
      estimate: the estimate.
      html, json, plot: names of files, or "-" for the standard output.
      is_one: whether there are no others; else files have the target's name before their endings.

    Raises:
      CommandError: a file can't be written, or matplotlib is not installed.
    """
    if json == "-":
        print(estimate.to_json())
    elif html == "-":
        print(estimate.to_html())
    else:
        estimate.show()
    for name, contents in ((html, estimate.to_html), (json, estimate.to_json)):
        if name is not None and name != "-":
            write_text(name if is_one else _of_target(name, estimate.target), contents)
    if plot is not None:
        file = plot if is_one else _of_target(plot, estimate.target)
        _writing(file, lambda: estimate.plot(file))


def _of_target(name: str, target: str) -> str:
    """Returns the name of a file about one of several targets: ``cost-v5e-4x4.html``."""
    path = Path(name)
    words = "".join(c if c.isalnum() else "-" for c in target)
    return str(path.with_name(f"{path.stem}-{words}{path.suffix}"))


def _writing(name: str, write: Callable[[], object]) -> None:
    try:
        write()
    except ImportError as error:
        raise CommandError(str(error)) from None
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{name or repr(name)} can't be written: {getattr(error, 'strerror', error)}."
        ) from None
