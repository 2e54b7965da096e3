"""Ported models beside by hand: counted, and within their bounds."""

import jax
import pytest

from benchmarks import models, ports
from benchmarks.table import Row


@pytest.fixture(autouse=True)
def as_the_benchmark_runs():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_ported_mlp_is_traced_within_its_bounds(monkeypatch):
    monkeypatch.setattr(ports, "cases", lambda small: models.cases(small)[:1])
    rows = list(ports.rows(small=True))
    assert [row.name.partition(", ")[2] for row in rows] == [
        "apply_policy",
        "apply_policy under autocast",
    ]
    assert not any(row.is_missed for row in rows)
    assert {row.bound for row in rows} == {1.95, 3.1}


def test_a_port_that_takes_twice_the_calls_is_missed():
    assert Row("calls", "a model, apply_policy", 2.0, 1.0, ports.PORTED).is_missed
