"""What data parallel training exchanges: compiled for eight devices, in a process that has them;
nothing is run.
"""

import re

from benchmarks import all_reduce
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
