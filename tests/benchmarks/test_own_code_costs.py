"""The table of what the one rule costs."""

import jax
import pytest

from benchmarks.own_code import costs


def rows_of(ratio):
    return [
        costs.Row(quantity, way, wing, ratio)
        for quantity, bounds in costs.BOUNDS.items()
        for way in bounds
        for wing in ("linen", "nnx")
    ]


def test_the_command_fails_where_a_bound_is_missed(monkeypatch, capsys):
    monkeypatch.setattr(costs, "rows", lambda: rows_of(1.0))
    assert costs.main(["--check"]) == 0
    monkeypatch.setattr(costs, "rows", lambda: rows_of(1.55))
    assert costs.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "tracing, provided layers, port, nnx: 1.55" in told
    assert "written by hand, use_policy" not in told  # its bound is 1.6


@pytest.mark.slow
@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_every_way_computes_what_flax_computes(monkeypatch, wing):
    monkeypatch.setattr(costs, "LAYERS", 1)
    for kind in ("provided layers", "written by hand", "small"):
        results = {
            way: function(argument)
            for way, (function, argument) in costs.programs(wing, kind).items()
        }
        assert costs.FLAX in results and len(results) >= 3
        shapes = {way: (y.shape, str(y.dtype)) for way, y in results.items()}
        assert set(shapes.values()) == {(costs.X.shape, "float32")}
        assert all(bool(jax.numpy.isfinite(y).all()) for y in results.values())
