"""What compare costs beside float32, on models small enough for a test: FLOPs and bytes, which XLA
counts.
"""

import pytest

from benchmarks import inspection_compare as benchmark

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


def test_a_comparison_needs_no_more_than_its_bounds_say():
    case = benchmark.Case("ours", benchmark.Ours(1, 64), 64, batch=8, length=32)
    found = {row.quantity: row for row in benchmark.step(case, times=0)}
    assert not found["flops"].is_missed and not found["memory"].is_missed
    assert found["flops"].ratio > 2, "both programs are in it"
