"""The convergence table: the small run, its report, and the page that is shown."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import beside_float32
from benchmarks.convergence import (
    STORAGES,
    Row,
    complaints,
    main,
    page,
    rows_of,
    stored,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "convergence.md"
GOOD = [Row(storage, 7e-4, 7e-4, 0.01, 0.99) for storage in STORAGES]


def test_the_small_run_prints_and_writes_every_row(tmp_path, capsys):
    path = tmp_path / "convergence.md"
    assert main(["--small", "--markdown", str(path)]) == 0
    printed, written = capsys.readouterr().out, path.read_text()
    line = ""
    for storage in STORAGES:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"| {storage.name} ")]
        assert "nan" not in line
        assert line in written
    assert " 0.0000 " not in line  # the last one's digits were run


def test_the_page_is_made_of_the_stored_figures():
    figures = stored()
    assert PAGE.read_text(encoding="utf-8") == page(figures, beside_float32.stored())
    assert [row.storage.name for row in rows_of(figures)] == [storage.name for storage in STORAGES]
    assert complaints(rows_of(figures)) == figures["missed"] == []


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("bfloat16, kahan", {"used_error": 8e-4}, "0.0008 on the quadratic, above 1.05 times f"),
        ("bfloat16, stochastic", {"used_error": 2.2e-3}, "0.0022 on the quadratic, above 3 times"),
        ("bfloat16, full", {"accuracy": 0.975}, "an accuracy of 97.50%, more than 1% below float"),
        ("bfloat16, remainder", {"loss": 0.02}, "other figures than bfloat16, full."),
    ],
)
def test_what_does_not_hold_is_named(name, change, text):
    assert complaints(GOOD) == []
    rows = [dataclasses.replace(row, **change) if row.storage.name == name else row for row in GOOD]
    assert any(text in complaint for complaint in complaints(rows))
