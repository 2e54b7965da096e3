"""What data parallel training exchanges: compiled for eight devices, in a process that has them;
nothing is run.
"""

import re

from benchmarks import all_reduce
from policy import Collective
from tests.eight_devices import run_python


def test_bfloat16_gradients_cross_and_one_step_within_its_budget_reads_them():
    printed = run_python("-m", "benchmarks.all_reduce", "--check", XLA_FLAGS="")
    rows = dict(re.findall(r"^(\S.*?) {2,}(\S+ .*(?:\n +all-reduce .*)+)", printed, re.MULTILINE))
    assert set(rows) == {row.name for row in all_reduce.rows()}
    wire, step, budget = map(float, rows["bf16 all-reduce, f32 weights"].split()[:3])
    assert wire == 2
    assert step <= budget == 42
    found = re.findall(
        r"all-reduce (\w+)\[([0-9,]*)\] over data", rows["bf16 all-reduce, f32 weights"]
    )
    assert sorted(found) == [
        ("bfloat16", "2048,512"),
        ("bfloat16", "512,2048"),
        ("float32", ""),
    ]  # and the loss
    assert rows["JAX and optax: pmean of the gradients"].startswith("4.00")


def test_a_row_that_exchanges_another_dtype_is_called_wrong(monkeypatch, capsys):
    row = next(row for row in all_reduce.rows() if row.name == "bf16 all-reduce, f32 weights")
    found = [
        Collective(
            "all-reduce", "float32", (all_reduce.WIDTH, all_reduce.HIDDEN), ("data",), "psum"
        )
    ]
    monkeypatch.setattr(all_reduce, "rows", lambda: [row])
    monkeypatch.setattr(all_reduce, "exchanges", lambda row: found)
    monkeypatch.setattr(all_reduce.optimizer, "measure", lambda row: (38.0, 0.0))
    assert all_reduce.print_table() == 1
    assert "  2.00  38.00      42  0.00  wrong" in capsys.readouterr().out
    found[0] = Collective(
        "all-reduce", "bfloat16", (all_reduce.WIDTH, all_reduce.HIDDEN), ("data",), "psum"
    )
    assert all_reduce.print_table() == 0
    monkeypatch.setattr(all_reduce.optimizer, "measure", lambda row: (43.0, 0.0))
    assert all_reduce.print_table() == 1
