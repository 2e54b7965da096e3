"""The front of error against cost: which points are on it, and which sets are compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from policy import PolicyRules
from policy.inspect.suggest.front import FrontPoint, front_lines, unbeaten
from policy.inspect.suggest.on_target import chosen_sets, measured_sets
from policy.inspect.suggest.search import Search
from policy.inspect.suggest.suggestion import Suggestion

NONE: frozenset[int] = frozenset()


def point(error: float, seconds: float | None, **options: Any) -> FrontPoint:
    rules = PolicyRules({f"layer_{error}".replace(".", "_"): "float32"})
    return FrontPoint(rules, ("layer",), error, None, seconds, 0.0, **options)


def test_the_front_has_what_nothing_beats_in_both_the_cheapest_first():
    few, some, every = point(0.1, 1.0), point(0.01, 2.0), point(0.0, 3.0)
    dear, worse = point(0.01, 2.5), point(0.2, 1.0)
    assert unbeaten([every, worse, dear, few, some]) == (few, some, every)
    assert dear.is_beaten_by(some) and not some.is_beaten_by(dear)
    assert not few.is_beaten_by(few)


def test_of_points_alike_the_first_stays_and_none_that_does_not_fit():
    first, second = point(0.1, 1.0), point(0.1, 1.0, is_emulated=False)
    lacking, exhausted = point(0.001, 0.5, missing=2**30), point(0.001, None, missing=2**30)
    assert unbeaten([lacking, exhausted, first, second]) == (first,)
    assert lacking.is_beaten_by(first) and not first.is_beaten_by(lacking)


def test_the_table_says_who_is_chosen_beaten_and_lacks_memory():
    chosen = point(0.1, 1.0, is_emulated=False)
    other = point(0.01, 2.0, is_lower_bound=True)
    beaten, lacking = point(0.02, 3.0), point(0.0, None, missing=3 * 2**29)
    lines = front_lines([chosen, other, beaten, lacking], chosen, "v5e", "cycles", 4)
    text = "\n".join(lines)
    assert lines[0] == "# on v5e, by cycles:"
    assert lines[2].split() == ["#", "0", "0.1", "-", "1", "1.000", "1", "of", "4", "chosen"]
    assert lines[3].split()[:5] == ["#", "1", "~0.01", "-", ">2"]
    assert "beaten by 1" in lines[4] and "lacks 1.50 GiB of memory" in lines[5]
    assert '# 1: PolicyRules([ ("layer_0_01", "float32"), ])' in text
    assert not any(line and not line.startswith("#") for line in lines), "it is no code"


def additive(squares: list[float]) -> Search:
    """A search of candidates whose errors add up in squares, each of the same cost."""
    return Search(
        lambda wide: math.sqrt(sum(e for i, e in enumerate(squares) if i not in wide)),
        lambda i: math.sqrt(squares[i]),
        [1.0] * len(squares),
    )


def test_all_sets_of_few_candidates_are_measured_and_of_many_those_that_remove_most_per_cost():
    few = measured_sets(additive([1.0, 2.0, 3.0, 4.0]))
    assert len(few) == 16 and few[frozenset([0, 2])] == math.sqrt(6)
    search = additive([float(i) for i in range(1, 10)])
    search.costs = [1.0] * 8 + [100.0]  # the error of the last is the largest, but so is its cost
    search.survey()
    many = measured_sets(search)
    assert set(map(len, many)) == set(range(10)) and len(many) == 10
    assert {frozenset([7]), frozenset(range(8))} <= set(many) and frozenset([8]) not in many


def test_the_chosen_sets_have_both_ends_and_are_far_from_each_other():
    costs = [1.0] * 10
    errors = {frozenset(range(count)): 10.0 ** (-count) for count in range(11)}
    chosen = chosen_sets(errors, costs, 3)
    assert chosen[:2] == [NONE, frozenset(range(10))]
    assert chosen[2] == frozenset(range(5)), "the middle"
    assert len(chosen_sets(errors, costs, 5)) == 5
    assert len(set(chosen_sets(errors, costs, 99))) == 11


def test_a_beaten_set_is_chosen_only_where_it_is_asked_for_and_overflows_are_chosen_from():
    costs = [1.0, 1.0, 1.0]
    # The first costs more than none, with no less error.
    errors = {NONE: math.inf, frozenset([0]): math.inf}
    errors |= {frozenset([1]): 0.1, frozenset([0, 1, 2]): 0.0}
    assert frozenset([0]) not in chosen_sets(errors, costs, 5)
    assert len(chosen_sets(errors, costs, 5)) == 3
    assert chosen_sets(errors, costs, 3, [frozenset([0])])[2] == frozenset([0])


def suggestion(points: tuple[FrontPoint, ...], budget: float = math.inf) -> Suggestion:
    fits = bool(points and points[0].fits)
    rules, error = (points[0].rules, points[0].error) if fits else (PolicyRules([]), math.nan)
    found = Suggestion(rules, "mixed_bfloat16", budget, error, 0.1, 0.1, (), points=points)
    chosen, timing = points[0] if fits else None, "the compiler's cycles"
    return dataclasses.replace(found, target="v5e:1x1", timing=timing, chosen=chosen)


def test_the_headline_says_what_chose_the_rules():
    points = (point(0.1, 1.0), point(0.01, 2.0))
    assert "of the cheapest point; error= chooses another" in str(suggestion(points))
    assert "# outputs within 0.2 of float32: 0.1 with" in str(suggestion(points, 0.2))
    lacking = suggestion((point(0.1, None, missing=2**30),))
    assert str(lacking).startswith("# no program fits on v5e:1x1") and lacking.front == ()


def test_the_front_is_drawn_and_written(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    points = (point(0.1, 1e-4), point(0.01, 2e-4), point(0.02, 3e-4), point(math.inf, 0.5e-4))
    figure = suggestion(points, 0.05).plot(tmp_path / "front.png")
    (axes,) = figure.axes
    front, beaten, chosen = axes.lines[:3]
    assert (tmp_path / "front.png").stat().st_size > 1000
    assert list(front.get_xdata()) == [50.0, 100.0, 200.0], "in microseconds"
    assert list(beaten.get_xdata()) == [pytest.approx(300.0)]
    assert list(chosen.get_ydata()) == [0.1] and axes.get_yscale() == "log"
    assert "v5e:1x1" in axes.get_title()


def test_without_matplotlib_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="not installed: pip install matplotlib"):
        suggestion((point(0.1, 1.0),)).plot()


def test_without_a_target_there_is_no_front_to_plot():
    plain = dataclasses.replace(suggestion((point(0.1, 1.0),)), target="")
    with pytest.raises(ValueError, match="no front to plot: give suggest a target"):
        plain.plot()
