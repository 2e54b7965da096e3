"""Writes the reports of a command to files and the standard output."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from policy.command_line.target import CommandError, prefixed_errors
from policy.inspect.estimate.report import Estimate

Contents = Callable[[], str]


def require_outputs(
    html: str | None, json: str | None, plot: str | None = None, count: int = 1
) -> None:
    """Refuses files that could not be written, before there is anything to write.

    Args:
      html, json, plot: names of files, or "-" for the standard output.
      count: of the targets that are estimated.

    Raises:
      CommandError: a folder is not there, a plot has another ending or no matplotlib, or several
        reports share the standard output.
    """
    if html == json == "-":
        raise CommandError(
            "--json - and --html - both take the standard output: give one of them a file."
        )
    if "-" in (html, json) and count > 1:
        raise CommandError(
            f"--json - and --html - print one report, but --on has {count} targets: give a file."
        )
    if plot is not None and Path(plot).suffix not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--plot {plot!r} should end in .png, .svg or .pdf.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot draws with matplotlib, which is missing: pip install matplotlib")
    for name in (html, json, plot):
        if name not in (None, "-") and not Path(name).parent.is_dir():
            raise CommandError(f"{name} can't be written: there is no folder {Path(name).parent}.")


def write_report(show: Callable[[], None], files: dict[str | None, Contents]) -> None:
    """Writes a report's files, and prints the one of "-", or else shows the report.

    Args:
      show: prints the report as text.
      files: the contents by the file's name; None for no file.

    Raises:
      CommandError: a file can't be written.
    """
    if "-" in files:
        print(files["-"]())
    else:
        show()
    for name, contents in files.items():
        if name not in (None, "-"):
            with prefixed_errors(f"{name!r} can't be written"):
                Path(name).write_text(contents(), encoding="utf-8")


def write_estimate(
    estimate: Estimate, *, html: str | None, json: str | None, plot: str | None, is_one: bool = True
) -> None:
    """Prints an estimate, or its report for the standard output, and writes the files.

    Args:
      estimate: the estimate.
      html, json, plot: names of files, or "-" for the standard output.
      is_one: whether there are no others; else files have the target's name before their endings.

    Raises:
      CommandError: a file can't be written.
    """

    def named(name: str | None) -> str | None:
        return name if is_one or name is None else _of_target(name, estimate.target)

    files = {named(html): estimate.to_html, named(json): estimate.to_json}
    write_report(estimate.show, files)
    if plot is not None:
        with prefixed_errors(f"{plot!r} can't be written"):
            estimate.plot(named(plot))


def _of_target(name: str, target: str) -> str:
    """Returns the name of a file about one of several targets: ``cost-v5e-4x4.html``."""
    path = Path(name)
    words = "".join(c if c.isalnum() else "-" for c in target)
    return str(path.with_name(f"{path.stem}-{words}{path.suffix}"))
