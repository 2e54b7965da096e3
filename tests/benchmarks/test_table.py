"""Rows, their bounds, and the command line that every table shares."""

import json

import pytest

from benchmarks import __main__ as everything
from benchmarks import convergence, memory, table
from benchmarks.accel import __main__ as accel
from benchmarks.eight_bits import __main__ as eight_bits
from benchmarks.estimates import __main__ as estimates
from benchmarks.own_code import __main__ as own_code
from benchmarks.packages import __main__ as packages
from benchmarks.table import Row


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (Row("bytes", "within", 102.0, 100.0, 1.02), False),
        (Row("bytes", "beyond", 103.0, 100.0, 1.02), True),
        (Row("bytes", "no bound", 300.0, 100.0), False),
        (Row("saved", "nothing of nothing", 0.0, 0.0, 1.0), False),
        (Row("saved", "something of nothing", 1.0, 0.0, 1.0), True),
        (Row("casts", "fewer", 1.0, 2.0, 1.0, at_least=1.0), True),
        (Row("casts", "none where some should be", 0.0, 0.0, 1.0, at_least=1.0), True),
        (Row("bytes", "not a number", float("nan"), 1.0, 1.0), True),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_row_is_missed_where_its_ratio_is_out_of_its_bounds(row, missed):
    assert row.is_missed is missed


def rows(small):
    yield Row("bytes", "within", 102.0, 100.0, 1.02, note="why")
    if not small:
        yield Row("flops", "beyond", 103.0, 100.0, 1.02)


def test_the_check_fails_and_names_the_row_that_broke(tmp_path, capsys):
    assert table.run("what", rows, "hand", ["--check", "--small"]) == 0
    file = tmp_path / "rows.json"
    assert table.run("what", rows, "hand", ["--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [(row["ratio"], row["missed"]) for row in written] == [(1.02, False), (1.03, True)]
    captured = capsys.readouterr()
    assert captured.err == "" and "why" in captured.out and "1.0300   1.02  missed" in captured.out
    assert table.run("what", rows, "hand", ["--check"]) == 1
    assert capsys.readouterr().err == "missed: flops of beyond: 1.0300, bound 1.02\n"


def test_every_table_is_a_module_and_is_chosen_by_its_name():
    apart = {"accel", "eight_bits", "estimates", "gpu", "memory", "packages"}
    assert set(everything.chosen([], quick=False)) == set(everything.TABLES) - apart
    quick = {"models", "autocast", "optimizer", "exchange", "scale"}
    assert set(everything.chosen([], quick=True)) >= quick
    assert list(everything.chosen(["gpu"], quick=False)) == ["gpu"]


@pytest.mark.cases(fast=5)
@pytest.mark.parametrize(
    ("main", "line", "text"),
    [
        (everything.main, "modles", "There is no table 'modles'. Tables: accel, models,"),
        (everything.main, "--quick --only accuracy", "The table 'accuracy' has no quick run."),
        (everything.main, "models --quick --write", "--write stores whole tables: leave --quick"),
        (everything.main, "models --on v5e", "--on is of the tables accel, estimates and memory"),
        (accel.main, "--only modles", "There is no table 'modles' of accelerators. Tables:"),
        (accel.main, "--only models --on v9", "There is no target 'v9'."),
        (accel.main, "--only sharded --on h100", "No table has rows of h100. Chips: sharded: v5e"),
        (convergence.main, "--small --write", "which no page is made of"),
        (eight_bits.main, "--quick --write", "--write is for the figures of the whole run"),
        (eight_bits.main, "--quick --full", "--quick and --full are two sizes: give one."),
        (eight_bits.main, "--quick --only smollm2", "smollm2: the quick run has errors and"),
        (estimates.main, "--only gpt", "There is no model 'gpt'."),
        (estimates.main, "--quick --write", "small models, which no page is made of."),
        (memory.main, "--only MPL", "No step is named 'MPL'. Steps: MLP, linen, float32"),
        (memory.main, "--on v5e", "A step runs on 'cpu', or 'here' on JAX's default device"),
        (own_code.main, "--write --only norm", "--only"),
        (packages.main, "--write --only e3x", "--write replaces the whole table: leave out --only"),
    ],
)
def test_a_line_that_can_not_be_run_is_rejected_by_its_command(main, line, text, capsys):
    try:
        status = main(line.split())
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    assert status and text in printed.err + printed.out


@pytest.mark.slow
def test_tables_run_apart_and_what_one_misses_is_the_commands_status(monkeypatch, tmp_path, capfd):
    (tmp_path / "fake_table.py").write_text(
        "import sys\nfrom benchmarks import table\n"
        "rows = lambda small: [table.Row('bytes', 'x', 2.0, 1.0, 1.0 if not small else None)]\n"
        "sys.exit(table.run('a table', rows, 'hand'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{table.__file__.rpartition('/benchmarks/')[0]}")
    monkeypatch.setattr(
        everything, "TABLES", {"fake": everything.Table("fake_table", "one", quick=("--small",))}
    )
    file, page = tmp_path / "all.json", tmp_path / "page.md"
    assert everything.main(["--json", str(file), "--markdown", str(page)]) == 0
    assert "| x | **2.000** (bound 1) |" in page.read_text() and "## fake" in page.read_text()
    assert json.loads(file.read_text())["tables"]["fake"][0]["ratio"] == 2.0
    assert everything.main(["--check"]) == 1
    assert "missed a bound: fake" in capfd.readouterr().err
    assert everything.main(["--check", "--quick"]) == 0
