"""What compare costs beside float32, on models small enough for a test: FLOPs and bytes, which XLA
counts.
"""

import jax
import pytest

from benchmarks import inspection_compare as benchmark


@pytest.fixture(autouse=True)
def as_the_benchmark_runs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_comparison_needs_no_more_than_its_bounds_say():
    case = benchmark.Case("ours", benchmark.Ours(1, 64), 64, batch=8, length=32)
    found = {row.quantity: row for row in benchmark.step(case, times=0)}
    assert not found["flops"].is_missed and not found["memory"].is_missed
    assert found["flops"].ratio > 2, "both programs are in it"
