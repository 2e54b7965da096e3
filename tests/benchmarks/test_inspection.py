"""The benchmark's rows; its figures are for `python -m benchmarks.inspection`."""

from benchmarks.autocast import mlp
from benchmarks.inspection import auditing


def test_an_audit_is_measured_beside_its_trace():
    row = auditing(mlp(2, 4), "bfloat16", times=1)
    assert (row.quantity, row.bound) == ("audit", 2.0)
    assert row.ours > 0 and row.reference > 0 and row.ratio == row.ours / row.reference
