"""The command `python -m benchmarks accel`, its targets, its rows and its recorded baselines;
nothing is compiled.
"""

import dataclasses
import json
import sys

import pytest

from benchmarks import page
from benchmarks.accel import __main__ as command
from benchmarks.accel import baseline, claims, layers, models, report, targets
from benchmarks.accel.program import Figures
from benchmarks.table import Row
from policy.inspect.estimate import targets as compilers
from policy.inspect.estimate.chips import CHIPS
from policy.inspect.estimate.targets import Target
from tests.benchmarks import accelerators

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


def test_a_table_has_one_topology_of_each_chip():
    assert [t.name for t in targets.chosen((), models.TARGETS, models.OTHERS)] == [
        "v5e:2x2",
        "v6e:2x2",
        "h100",
    ]
    chosen = targets.chosen(["v5p", "v5e:4x4", "b200"], models.TARGETS, models.OTHERS)
    assert [t.name for t in chosen] == ["v5p:2x2x1", "v5e:4x4", "b200"]
    kinds = {t.split(":")[0] for t in (*models.TARGETS, *models.OTHERS)}
    assert (
        kinds == set(targets.CHIPS) == {t.split(":")[0] for t in (*layers.TARGETS, *layers.OTHERS)}
    )


def test_a_missing_compiler_skips_a_test_and_fails_it_where_it_is_required(monkeypatch):
    def missing(**_):
        raise RuntimeError("no plugin")

    compilers._topology.cache_clear()
    monkeypatch.setattr(compilers.topologies, "get_topology_desc", missing)
    monkeypatch.delenv(accelerators.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="No compiler for h100: no plugin"):
        accelerators.target("h100")
    monkeypatch.setenv(accelerators.REQUIRED, "1")
    with pytest.raises(RuntimeError, match="No compiler for h100: no plugin"):
        accelerators.target("h100")


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


def test_rows_name_exchanges_and_rooflines():
    ours = figures(collectives={("all-gather", "bf16"): 8.0}, exchange=2e-6, rooflines=("splash",))
    rows = {r.quantity: r for r in report.rows_of("x", V5E, ours, figures(), note="why")}
    assert rows["exchange"].note == "all-gather of bf16" and rows["exchange"].ours == 8.0
    assert rows["cycles"].note == "why; at the roofline: splash"
    assert rows["seconds"].note == "2 us of them exchange"
    assert rows["seconds"].reference == 1500.0 / V5E.chip.clock
    assert rows["seconds"].ours == pytest.approx(1500.0 / V5E.chip.clock + 2e-6)


def test_of_a_gpu_there_are_no_cycles():
    rows = {r.quantity for r in report.rows_of("x", Target("h100"), figures(), figures())}
    assert rows == {"bytes", "temporary", "kernels"}


@pytest.mark.parametrize(("table", "small"), [(models, {"small MLP"}), (layers, set(layers.SMALL))])
def test_a_table_has_its_rows_in_both_wings(table, small, monkeypatch):
    monkeypatch.setattr(Target, "devices", [None] * 4)
    monkeypatch.setattr(table, "figures", lambda *args, **kwargs: figures())
    monkeypatch.setattr(
        models, "programs", lambda *args: dict.fromkeys(("ours", "hand", "autocast"))
    )
    rows = list(table.rows(on=["v5e", "h100"]))
    names = {row.name for row in rows}
    assert {name.rpartition(", ")[2] for name in names} == {"linen", "nnx"}
    assert {name.rpartition(", ")[0] for name in names} == {case.name for case in _cases(table)}
    assert {row.name.rpartition(", ")[0] for row in table.rows(small=True)} == small
    only = next(iter(_cases(table))).name
    assert {row.name.rpartition(", ")[0] for row in table.rows(on=["v5e"], only=[only])} == {only}


def _cases(table):
    return models.cases(4) if table is models else layers.cases()


def test_models_are_held_to_the_bounds_of_by_hand_and_of_autocast(monkeypatch):
    monkeypatch.setattr(Target, "devices", [None])
    monkeypatch.setattr(models, "figures", lambda *args: figures(temporary=2.0**30))
    monkeypatch.setattr(
        models, "programs", lambda *args: dict.fromkeys(("ours", "hand", "autocast"))
    )
    bounds = {r.quantity: r.bound for r in models.rows(small=True, on=["v6e"])}
    held = {name: bound for name, bound in bounds.items() if bound is not None}
    assert held == {"cycles": 1.0, "bytes": 1.02, "temporary": 1.05, "/autocast": 1.02}


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


def test_a_baseline_of_another_compiler_is_not_compared(tmp_path, monkeypatch):
    file = tmp_path / "baseline.json"
    baseline.record(of(1000.0), file)
    monkeypatch.setattr(baseline, "_version", lambda name: "99")
    rows, absent = baseline.beside_recorded(of(5000.0), baseline.load(file))
    assert rows == []
    assert absent == ["1 baselines are not recorded: models on v5e:1x1 by jax 99, libtpu 99"]


def test_the_recorded_baselines_can_be_read():
    for of_targets in baseline.load().values():
        for target, tables in of_targets.items():
            assert Target(target).chip
            assert all(
                set(row) <= set(baseline.QUANTITIES)
                for rows in tables.values()
                for row in rows.values()
            )


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


def test_the_commands_rows_are_stored_and_make_a_page(fake_table):
    assert command.main(["--record", "--json", str(fake_table / "rows.json")]) == 0
    rows = json.loads((fake_table / "rows.json").read_text())
    assert [row["table"] for row in rows] == ["fake"]
    where = {"date": "today", "device": "cpu", "jax": "0.12"}
    page.store("accel", where, rows, fake_table)
    page.store("layers", where, [Row("bytes", "y", 1.0, 1.0).as_json()], fake_table)
    made = page.markdown(page.stored(fake_table))
    assert "On v5e:1x1:" in made and "| x | **1.500** (bound 1) (3 / 2) |" in made
    assert "Compiled on today, on cpu, with jax 0.12." in made
    assert made.index("## TPUs and GPUs") < made.index("## XLA for CPUs") < made.index("### Layers")


def test_rows_of_a_target_replace_those_of_the_same_target_alone(tmp_path):
    where = {"date": "today", "device": "cpu", "jax": "0.12"}
    of = lambda target, ours: {  # noqa: E731
        "table": "models",
        **Row("bytes", "x", ours, 2.0, target=target).as_json(),
    }
    page.store("accel", where, [of("v5e:2x2", 1.0), of("h100", 2.0)], tmp_path)
    page.store("accel", where, [of("v5e:2x2", 3.0)], tmp_path)
    (one,) = page.stored(tmp_path).values()
    assert {row["target"]: row["ratio"] for row in one["rows"]} == {"v5e:2x2": 1.5, "h100": 1.0}
    assert "| x, v5e:2x2 | 1.500 (3 / 2) |" in page.markdown({"accel": one})
    with pytest.raises(ValueError, match=r"The stored rows are of jax 0.12, and these of jax 0.13"):
        page.store("accel", where | {"jax": "0.13"}, [of("h100", 2.0)], tmp_path)


def test_without_compilers_the_command_says_so_in_a_line(monkeypatch, capsys):
    def missing(**_):
        raise RuntimeError("no plugin")

    compilers._topology.cache_clear()
    monkeypatch.setattr(compilers.topologies, "get_topology_desc", missing)
    assert command.main(["--only", "models"]) == 2
    assert capsys.readouterr().err == f"No compiler for v5e:1x1: no plugin. {compilers.INSTALL}\n"


def test_sentences_have_the_rows_figures(tmp_path, capsys):
    rows = [
        Row("cycles", name, ratio, 1.0, target="v5e:2x2")
        for name, ratio in (("a", 0.9), ("b", 1.1))
    ]
    written = [{"table": "models", **row.as_json()} for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(written))
    claims.main([str(tmp_path / "rows.json")])
    printed = capsys.readouterr().out
    assert (
        "takes 0.90 to 1.10 of the cycles on v5e" in printed and "(the most: b, v5e:2x2)" in printed
    )
    (tmp_path / "all.json").write_text(json.dumps({"tables": {"accel": written}}))
    claims.main([str(tmp_path / "all.json")])
    assert capsys.readouterr().out == printed
