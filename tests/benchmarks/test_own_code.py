"""Models with code of their own: their programs' counts, their errors, and the command."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.own_code import __main__ as command
from benchmarks.own_code import measure, rows
from benchmarks.own_code.measure import POLICIES, Figures, Truths
from benchmarks.own_code.models import OURS, WAYS
from benchmarks.own_code.rows import CLOSING, OPENING, RATIO, Row
from benchmarks.own_code.snippet import Snippet

BF16 = jnp.bfloat16
GOOD = Figures(0, 0, 1e-3, 1e-3)
BY_NAME = {snippet.name: snippet for snippet in command.SNIPPETS}
SEEDS = range(5)


@pytest.fixture(scope="module")
def truths() -> dict[str, Truths]:
    return {}


def truths_of(known: dict[str, Truths], snippet: Snippet) -> Truths:
    if snippet.name not in known:
        known[snippet.name] = Truths.of(snippet, seeds=SEEDS)
    return known[snippet.name]


# --------------------------------------------------------------------------------------------------
# Snippets
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", BY_NAME)
def test_own_code_multiplies_in_half_and_sums_in_float32(name, way):
    found = {policy: measure.counts(BY_NAME[name], way, policy) for policy in POLICIES}
    assert {(f.float32_matmuls, f.half_sums) for f in found.values()} == {(0, 0)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["RMSNorm", "mixture of logistics", "connectionist loss"])
def test_gradients_are_as_accurate_as_autocasts(name, policy, truths):
    snippet = BY_NAME[name]
    for way in OURS:
        figures = measure.measured(snippet, way, policy, truths_of(truths, snippet))
        assert figures.ratio <= RATIO and figures.error < 0.02


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", ["RMSNorm", "connectionist loss"])
def test_in_float32_a_model_is_the_maths_that_it_is_measured_beside(name, way, truths):
    snippet = BY_NAME[name]
    known = truths_of(truths, snippet)
    with measure.as_people_run():
        step = measure.step_of(snippet, way, "float32")
        assert measure.error(step, known.drawn, known.gradients) < 2e-6


# --------------------------------------------------------------------------------------------------
# Counts
# --------------------------------------------------------------------------------------------------


def counted(fn: Any, *args: Any) -> tuple[int, int]:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return measure.float32_matmuls(jaxpr), measure.half_sums(jaxpr)


def test_float32_matmuls_are_those_that_contract_a_float32_operand():
    w, half = jnp.ones((4, 4)), jnp.ones((4, 4), BF16)
    mixed = jax.lax.dot(half, w, preferred_element_type=jnp.float32)
    assert mixed.dtype == jnp.float32
    assert counted(lambda: jax.lax.dot(half, w, preferred_element_type=jnp.float32)) == (1, 0)
    assert counted(lambda: (w @ w, half @ half, jnp.einsum("i,j->ij", w[0], w[1]))) == (1, 0)
    assert counted(lambda: jax.lax.scan(lambda h, _: (h @ w, None), w, length=3)[0]) == (1, 0)
    assert counted(lambda: w.astype(jnp.complex64) @ w.astype(jnp.complex64)) == (0, 0)
    image, kernel = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
    assert counted(lambda: jax.lax.conv(image, kernel, (1, 1), "SAME")) == (1, 0)


def test_half_sums_are_those_of_several_terms():
    half = jnp.ones((4, 1), BF16)
    place = jnp.array([[0], [0]])
    numbers = jax.lax.ScatterDimensionNumbers((), (0,), (0,))
    zeros, ones = jnp.zeros(4, BF16), jnp.ones(2, BF16)

    def scattered(unique: bool) -> Any:
        return jax.lax.scatter_add(zeros, place, ones, numbers, unique_indices=unique)

    def windowed() -> Any:
        zero = jnp.zeros((), BF16)
        return jax.lax.reduce_window(half, zero, jax.lax.add, (2, 1), (1, 1), "SAME")

    assert counted(lambda: jax.lax.reduce_sum_p.bind(half, axes=(0,), out_sharding=None)) == (0, 1)
    assert counted(lambda: jax.lax.reduce_sum_p.bind(half, axes=(1,), out_sharding=None)) == (0, 0)
    assert counted(lambda: jnp.sum(half)) == (0, 0)  # JAX's own sums in float32
    assert counted(lambda: jax.lax.cumsum(half)) == (0, 1)
    assert counted(lambda: jax.lax.cumsum(half, axis=1)) == (0, 0)
    assert counted(windowed) == (0, 1)
    assert counted(lambda: scattered(False)) == (0, 1)
    assert counted(lambda: scattered(True)) == (0, 0)


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (Figures(2, 0, 1e-3, 1e-3), "float32 matmuls 2, bound 0"),
        (Figures(0, 1, 1e-3, 1e-3), "half sums 1, bound 0"),
        (Figures(0, 0, 2e-3, 1e-3), "an error of 2.00 (2.0e-03 / 1.0e-03), bound 1.25"),
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
    part = command.PAGE.read_text().partition(OPENING)[2].partition(CLOSING)[0]
    lines = [line.split(" | ") for line in part.splitlines() if line.startswith("|")]
    head, _, *shown = rows.table([Row(name, {}) for name in BY_NAME]).splitlines()
    assert " | ".join(lines[0]) == head
    assert [line[0] for line in lines[2:]] == [line.partition(" | ")[0] for line in shown]
