"""Programs of gradients that are accumulators, as a TPU v5e gets them."""

from benchmarks.accel import accumulators
from tests.benchmarks import accelerators


def test_a_small_model_costs_no_more_cycles_or_bytes():
    accelerators.target("v5e:2x2")
    rows = {row.quantity: row for row in accumulators.rows(small=True, on=["v5e"])}
    assert rows["cycles"].ratio <= 1
    assert rows["bytes"].ratio <= 1.001
    assert rows["kernels"].ratio < 1
    assert "f32" in rows["exchange"].note and "bf16" not in rows["exchange"].note
