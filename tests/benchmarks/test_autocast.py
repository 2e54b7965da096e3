"""What autocast costs beside a model threaded by hand: what is saved for the backward pass, traced
and not compiled.
"""

import pytest

from benchmarks import autocast as benchmark

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


TINY = [
    benchmark.mlp(256, 32),
    benchmark.resnet((1, 1), 8, 32),
    benchmark.decoder(1, 16, 16, width=32, dropout=0.1),
    benchmark.decoder(1, 16, 16, width=32, gelu=True),
]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_no_more_is_saved_than_by_a_model_threaded_by_hand(case):
    row = benchmark.saved(case)
    assert row.ours <= row.reference
    assert not row.is_missed


def test_float32_misses_the_bound(monkeypatch):
    monkeypatch.setattr(benchmark, "autocast", lambda fn, *_, **__: fn)
    assert [case.name for case in TINY if not benchmark.saved(case).is_missed] == []


def test_every_use_of_a_weight_has_its_cast_and_in_a_loop_it_stands_inside():
    row = benchmark.casts(benchmark.reused(3), (32, 32))
    assert (row.ours, row.reference, row.is_missed) == (3, 3, False)
    row = benchmark.casts(benchmark.recurrent(4), (32, 32), within="scan")
    assert (row.ours, row.reference, row.is_missed) == (2, 2, False)
    assert benchmark.casts(
        benchmark.recurrent(4), (32, 32), within="while"
    ).is_missed  # none there: 0 / 0
    fewer = benchmark.casts(
        benchmark.decoder(1, 16, 16, width=32, tied=True), (256, 32)
    )  # cast after it is looked up
    assert (fewer.ours, fewer.reference, fewer.is_missed) == (1, 2, True)
