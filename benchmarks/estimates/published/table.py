"""The section of docs/estimates.md on published runs, made of their stored estimates."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.estimates.published.results import stored
from benchmarks.estimates.published.runs import RUNS, Run, arithmetic, published_seconds
from benchmarks.markdown import table as markdown

FIGURES = ("run", "devices", "published, s", "estimate, s", "error", "in sequence, s", "left out")
SETTINGS = ("run", "devices", "batch", "settings", "published")
Found = Mapping[str, Any]


def section() -> str:
    """Returns the tables of the runs that are stored, and the range of their errors."""
    runs = [run for run in RUNS if stored(run) is not None]
    return "\n\n".join([figures(runs), errors(runs), settings(runs)])


def figures(runs: Sequence[Run]) -> str:
    """Returns the table of published and estimated seconds."""
    return markdown(list(FIGURES), [_cells(run, _row(run)) for run in runs], 2)


def settings(runs: Sequence[Run]) -> str:
    """Returns the table of what was run, and of the figures that seconds follow from."""
    rows = [
        [
            run.model,
            run.target,
            _batch(run),
            run.settings,
            f"[{run.source}]({run.url}): {arithmetic(run)}",
        ]
        for run in runs
    ]
    return markdown(list(SETTINGS), rows, len(SETTINGS))


def errors(runs: Sequence[Run]) -> str:
    """Returns the range of errors, and their median without signs."""
    found = [error for run in runs if (error := _error(run, _row(run))) is not None]
    median = statistics.median(map(abs, found))
    return (
        f"Errors are {min(found):+.0%} to {max(found):+.0%}; without their signs the median is "
        f"{median:.0%}."
    )


def _row(run: Run) -> Found:
    found = stored(run)
    if found is None:
        raise ValueError(f"{run.name} is not stored: compile it with --only {run.name}.")
    return found["rows"][0]


def _cells(run: Run, row: Found) -> list[str]:
    error = _error(run, row)
    estimate, in_sequence = _seconds(row)
    return [
        run.model,
        run.target,
        seconds(published_seconds(run)),
        "does not fit" if estimate is None else seconds(estimate),
        "" if error is None else f"{error:+.0%}",
        "" if in_sequence is None or run.devices == 1 else seconds(in_sequence),
        run.left_out,
    ]


def _batch(run: Run) -> str:
    return f"{run.batch} images" if run.size is None else f"{run.batch} x {run.size.length}"


def _seconds(row: Found) -> tuple[float | None, float | None]:
    """Returns the seconds of a step where exchanges run beside kernels, and where they follow them;
    None where the step does not fit.
    """
    kernels, overlapped = row["compute_seconds"], row.get("overlapped_seconds")
    if kernels is None:
        return None, None
    in_sequence = kernels + sum(one["seconds"] or 0.0 for one in row["collectives"])
    return in_sequence if overlapped is None else overlapped, in_sequence


def _error(run: Run, row: Found) -> float | None:
    estimate, _ = _seconds(row)
    return None if estimate is None else estimate / published_seconds(run) - 1


def seconds(amount: float) -> str:
    return f"{amount:.3g}" if amount < 100 else f"{amount:.0f}"
