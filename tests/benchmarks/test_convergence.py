"""Where training ends by storage mode and by the dtype of moments."""

import dataclasses

import pytest

from benchmarks import moments
from benchmarks.convergence import STORAGES, Row, complaints, main, rows_of, stored

GOOD = [Row(storage, 7e-4, 7e-4, 0.01, 0.99) for storage in STORAGES]


@pytest.mark.slow
def test_the_small_run_prints_and_writes_every_row(tmp_path, capsys):
    path = tmp_path / "convergence.md"
    assert main(["--small", "--markdown", str(path)]) == 0
    printed, written = capsys.readouterr().out, path.read_text()
    for storage in STORAGES:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"| {storage.name} ")]
        assert "nan" not in line and line in written


def test_the_stored_figures_miss_no_bound():
    figures = stored()
    assert complaints(rows_of(figures)) == figures["missed"] == []


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("bfloat16, full", {"used_error": 8e-4}, "0.0008 on the quadratic, above 1.05 times f"),
        ("bfloat16, stochastic", {"used_error": 2.2e-3}, "0.0022 on the quadratic, above 3 times"),
        ("bfloat16, full", {"accuracy": 0.975}, "an accuracy of 97.50%, more than 1% below float"),
        ("bfloat16, remainder", {"loss": 0.02}, "other figures than bfloat16, full."),
    ],
)
def test_what_does_not_hold_is_named(name, change, text):
    assert complaints(GOOD) == []
    rows = [dataclasses.replace(row, **change) if row.storage.name == name else row for row in GOOD]
    assert any(text in complaint for complaint in complaints(rows))


@pytest.mark.slow
def test_a_quadratic_ends_as_in_float32_in_8_bits_and_not_with_one_linear_scale():
    by_name = {storage.name: storage for storage in moments.STORAGES}
    exact = moments.quadratic(by_name["float32"], 300)
    assert moments.quadratic(by_name["int8"], 300) < 1.05 * exact
    assert moments.quadratic(by_name["control: one linear scale"], 300) > 1.5 * exact
