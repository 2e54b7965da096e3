"""The benchmark's rows; its figures are for `python -m benchmarks.inspection`."""

import json

import pytest

from benchmarks import inspection
from benchmarks.autocast import mlp
from benchmarks.inspection import Row, auditing, main


def test_an_audit_is_measured_beside_its_trace():
    row = auditing(mlp(2, 4), "bfloat16", times=1)
    assert (row.quantity, row.bound) == ("audit", 2.0)
    assert row.ours > 0 and row.beside > 0 and row.ratio == row.ours / row.beside


@pytest.mark.parametrize(("ours", "status"), ((1.9, 0), (2.1, 1)))
def test_a_missed_bound_fails_the_check(monkeypatch, capsys, ours, status):
    monkeypatch.setattr(inspection, "rows", lambda times: iter([Row("audit", "a model", ours, 1.0, 2.0)]))
    assert main(["--check"]) == status
    assert ("missed" in capsys.readouterr().out) == bool(status)
    assert main([]) == 0


def test_rows_as_json(monkeypatch, capsys):
    monkeypatch.setattr(inspection, "rows", lambda times: iter([Row("audit", "a model", 3.0, 2.0, 2.0)]))
    main(["--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row["ratio"] == 1.5
