"""The table of precisions: layers in float32 inside of bfloat16, compiled and emulated."""

import pytest

from benchmarks.accel import precision
from tests.benchmarks import accelerators


def row(**changes):
    fields = {
        "name": "Dense",
        "precisions": ("highest",) * 3,
        "cycles": dict.fromkeys(precision.PRECISIONS, 2.0),
        "errors": {"bfloat16": 3e-3, "default": 2e-3, "high": 4e-6, "highest": 4e-7},
    }
    return precision.Row(**(fields | changes))


def test_a_row_misses_its_bounds_by_precision_and_by_error():
    assert list(row().missed()) == []
    (told,) = row(precisions=("highest", "default", "highest")).missed()
    assert "highest, default, highest" in told
    (told,) = row(errors=row().errors | {"highest": 2e-3}).missed()
    assert "2.0e-03" in told


@pytest.mark.slow
def test_a_router_multiplies_at_the_highest_precision_on_both_chips():
    for name in precision.TARGETS:
        accelerators.target(name)
    (case,) = (case for case in precision.CASES if "router" in case.name)
    found = precision.row_of(case)
    assert list(found.missed()) == []
    assert found.errors["default"] > 1e3 * found.errors["highest"]
    assert found.cycles["default"] <= found.cycles["high"] <= found.cycles["highest"]
