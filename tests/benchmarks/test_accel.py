"""The command `python -m benchmarks accel`, its targets, its rows and its recorded baselines;
nothing is compiled.
"""

import dataclasses
import sys

import pytest

from benchmarks import page
from benchmarks.accel import __main__ as command
from benchmarks.accel import baseline, report
from benchmarks.accel.program import Figures
from benchmarks.table import Row
from policy.inspect.estimate import targets as compilers
from policy.inspect.estimate.chips import CHIPS
from policy.inspect.estimate.targets import Target

V5E = Target("v5e:1x1")


def figures(**changes):
    plain = Figures(
        cycles=1500.0,
        bytes=100.0,
        moved=90.0,
        has_loops=False,
        temporary=10.0,
        arguments=5.0,
        kernels=3,
        flops=1.0,
        collectives={},
        exchange=0.0,
        uncounted=(),
        rooflines=(),
        seconds=0.1,
    )
    return dataclasses.replace(plain, **changes)


def test_a_gpus_configuration_holds_its_figures():
    h100 = CHIPS["h100"].target_config()
    assert (
        "core_count: 132" in h100
        and "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in h100
    )
    for gpu in (chip for chip in CHIPS.values() if chip.device):
        assert abs(gpu.device["memory_bandwidth"] / gpu.bandwidth - 1) < 0.05


def test_rows_have_bounds_and_say_what_they_leave_out():
    rows = {
        r.quantity: r
        for r in report.rows_of("x", V5E, figures(cycles=1600.0), figures(), {"cycles": 1.05})
    }
    assert rows["cycles"].is_missed and not rows["bytes"].is_missed and rows["bytes"].bound is None
    assert "seconds" not in rows and "exchange" not in rows
    left_out = figures(uncounted=("the trip count of while.1 (f)",))
    rows = {r.quantity: r for r in report.rows_of("x", V5E, left_out, figures())}
    assert {name for name, row in rows.items() if row.is_missed} == {"cycles", "bytes", "kernels"}
    assert "not counted: the trip count of while.1 (f)" in command.line(rows["cycles"])


# --------------------------------------------------------------------------------------------------
# Baselines
# --------------------------------------------------------------------------------------------------


def of(cycles: float, target: str = "v5e:1x1") -> dict:
    return {"models": [Row("cycles", "Dense, linen", 1.0, cycles, target=target).as_json()]}


def test_a_baseline_that_got_dearer_is_missed(tmp_path):
    file = tmp_path / "baseline.json"
    baseline.record(of(1000.0), file)
    recorded = baseline.load(file)
    for cycles, missed in ((900.0, False), (1020.0, False), (1021.0, True)):
        rows, absent = baseline.beside_recorded(of(cycles), recorded)
        assert [row.is_missed for row in rows] == [missed] and not absent
    assert rows[0].name == "by hand: Dense, linen" and rows[0].reference == 1000.0


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_table(tmp_path, monkeypatch):
    """A table of one row in place of all, and compilers that are there."""
    (tmp_path / "fake_accel.py").write_text(
        "import sys\nfrom benchmarks.table import Row, run\n"
        "def rows(small, on=()):\n"
        "    yield Row('cycles', 'x', 3.0, 2.0, None if small else 1.0, target=(on or "
        "['v5e:1x1'])[0])\n"
        "sys.exit(run('a table', rows, 'hand')) if __name__ == '__main__' else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{page.__file__.rpartition('/benchmarks/')[0]}")
    monkeypatch.setattr(command, "TABLES", {"fake": command.Table("fake_accel", ("v5e", "h100"))})
    monkeypatch.setattr(command, "QUICK", ("fake",))
    monkeypatch.setattr(Target, "devices", [None])
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    yield tmp_path
    sys.modules.pop("fake_accel", None)


def test_the_command_fails_where_a_bound_is_missed(fake_table, capfd):
    assert command.main([]) == 0
    assert command.main(["--quick", "--check"]) == 0
    assert "1 baselines are not recorded: fake, quick on v5e:1x1" in capfd.readouterr().out
    assert command.main(["--check", "--on", "h100"]) == 1
    captured = capfd.readouterr()
    assert (
        "missed: cycles of x on h100: 1.5000, bound 1" in captured.err
        and "missed a bound: fake" in captured.err
    )


def test_the_command_fails_where_a_baseline_got_dearer(fake_table, capfd):
    assert command.main(["--quick", "--record"]) == 0
    assert command.main(["--quick", "--check"]) == 0
    file = fake_table / "baseline.json"
    file.write_text(file.read_text().replace('"cycles": 2.0', '"cycles": 1.5'))
    assert command.main(["--quick", "--check"]) == 1
    captured = capfd.readouterr()
    assert (
        "dearer than recorded: cycles of by hand: x on v5e:1x1: 1.3333, bound 1.02" in captured.err
    )
    assert "missed a bound: baseline" in captured.err


def test_without_compilers_the_command_says_so_in_a_line(monkeypatch, capsys):
    def missing(**_):
        raise RuntimeError("no plugin")

    compilers._topology.cache_clear()
    monkeypatch.setattr(compilers.topologies, "get_topology_desc", missing)
    assert command.main(["--only", "models"]) == 2
    assert capsys.readouterr().err == f"No compiler for v5e:1x1: no plugin. {compilers.INSTALL}\n"
