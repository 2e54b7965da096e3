"""Ported models beside by hand: counted, and within their bounds."""

import pytest

from benchmarks import models, ports

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


def test_a_ported_mlp_is_traced_within_its_bounds(monkeypatch):
    monkeypatch.setattr(ports, "cases", lambda small: models.cases(small)[:1])
    rows = list(ports.rows(small=True))
    assert [row.name.partition(", ")[2] for row in rows] == [
        "apply_policy",
        "apply_policy under autocast",
    ]
    assert not any(row.is_missed for row in rows)
    assert {row.bound for row in rows} == {1.95, 3.1}
