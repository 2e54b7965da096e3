"""The section of docs/estimates.md on published runs, made of their stored estimates."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.estimates.published.results import stored
from benchmarks.estimates.published.runs import RUNS, Run, arithmetic, published_seconds
from benchmarks.markdown import table as markdown

FIGURES = ("run", "devices", "published, s", "estimate, s", "error", "of it exchanges", "left out")
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
    kernels, exchanges = _seconds(row)
    fits = kernels is not None
    return [
        run.model,
        run.target,
        seconds(published_seconds(run)),
        seconds(kernels + exchanges) if fits else "does not fit",
        "" if error is None else f"{error:+.0%}",
        seconds(exchanges) if fits and run.devices > 1 else "",
        run.left_out,
    ]


def _batch(run: Run) -> str:
    return f"{run.batch} images" if run.size is None else f"{run.batch} x {run.size.length}"


def _seconds(row: Found) -> tuple[float | None, float]:
    """Returns the seconds of the kernels, None where the step does not fit, and of exchanges."""
    return row["compute_seconds"], sum(one["seconds"] or 0.0 for one in row["collectives"])


def _error(run: Run, row: Found) -> float | None:
    kernels, exchanges = _seconds(row)
    return None if kernels is None else (kernels + exchanges) / published_seconds(run) - 1


def seconds(amount: float) -> str:
    return f"{amount:.3g}" if amount < 100 else f"{amount:.0f}"
