"""Models with code of their own: their errors, the command and the page."""

import functools

import jax.numpy as jnp
import pytest

from benchmarks.own_code import __main__ as command
from benchmarks.own_code import measure, rows
from benchmarks.own_code.measure import POLICIES, Figures, Truths
from benchmarks.own_code.models import OURS, WAYS
from benchmarks.own_code.rows import RATIO, Row

BF16 = jnp.bfloat16
GOOD = Figures(0, 0, 1e-3, 1e-3)
BY_NAME = {snippet.name: snippet for snippet in command.SNIPPETS}


@functools.cache
def truths_of(name: str) -> Truths:
    return Truths.of(BY_NAME[name], seeds=range(5))


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["RMSNorm", "mixture of logistics", "connectionist loss"])
def test_gradients_are_as_accurate_as_autocasts(name, policy):
    for way in OURS:
        figures = measure.measured(BY_NAME[name], way, policy, truths_of(name))
        assert figures.ratio <= RATIO and figures.error < 0.02


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (Figures(2, 0, 1e-3, 1e-3), "float32 matmuls 2, bound 0"),
        (Figures(0, 1, 1e-3, 1e-3), "half sums 1, bound 0"),
        (Figures(0, 0, float("nan"), 1e-3), "an error of nan (nan / 1.0e-03), bound 1.25"),
        ("TypeError: no", "TypeError: no"),
    ],
)
def test_a_planted_bad_row_is_named_and_fails_the_check(figures, line, monkeypatch, capsys):
    found = {(policy, way): GOOD for policy in POLICIES for way in WAYS}
    good, bad = Row("good", found), Row("bad", found | {(POLICIES[1], "nnx"): figures})
    monkeypatch.setattr(command, "rows", lambda only, counts_only: [good, bad])
    assert command.main([]) == 0
    assert command.main(["--check"]) == 1
    assert capsys.readouterr().err == f"missed: bad, nnx, mixed_float16: {line}\n"
    assert "**" in rows.table([good, bad]) and "**" not in rows.table([good])
    monkeypatch.setattr(command, "rows", lambda only, counts_only: [good])
    assert command.main(["--check"]) == 0


def test_the_page_has_a_row_for_each_snippet():
    page = command.PAGE.read_text()
    part = page.partition("<!-- own code -->")[2].partition("<!-- end of own code -->")[0]
    lines = [line.split(" | ") for line in part.splitlines() if line.startswith("|")]
    head, _, *shown = rows.table([Row(name, {}) for name in BY_NAME]).splitlines()
    assert " | ".join(lines[0]) == head
    assert [line[0] for line in lines[2:]] == [line.partition(" | ")[0] for line in shown]
