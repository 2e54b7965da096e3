"""Random programs under policies: their numbers are right, and wrong numbers would be found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.random_programs import judge as judging
from tests.random_programs.__main__ import main
from tests.random_programs.draw import Leaf, Op, Program, draw, source
from tests.random_programs.judge import CLASSES, POLICIES, Judge, confirmed, runs, way_of
from tests.random_programs.minimize import minimized, snippet

SMALL = Program(
    (Leaf("x0", (4, 8), False, 1), Leaf("w1", (8, 4), True, 2)),
    (
        Op("v1", "matmul", ("x0", "w1")),
        Op("v2", "relu", ("v1",)),
        Op("v3", "sum", ("v2",), (("axes", -1), ("keep", False))),
    ),
    "v3",
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_numbers_of_a_random_program_are_right(seed):
    policy, kind = POLICIES[seed % 3], CLASSES[seed // 3 % 4]
    program = draw(seed, "float16" if policy == "mixed_float16" else "bfloat16")
    assert not confirmed(program, way_of(kind, seed), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_of_a_small_program_are_right(policy):
    assert Judge(SMALL, "bfloat16").is_usable
    assert not confirmed(SMALL, "function", policy)


def test_a_program_is_drawn_from_its_seed():
    assert draw(3, "bfloat16") == draw(3, "bfloat16") != draw(4, "bfloat16")


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (lambda v: v * 0, "zero gradient"),
        (lambda v: v * 1.1, "gradient"),
        (lambda v: v / 0, "not finite"),
        (lambda v: v[:1], "shape"),
    ],
)
def test_a_wrong_gradient_is_found(planted, kind):
    judge = Judge(SMALL, "bfloat16")
    (_, _), (_, run), _ = runs(SMALL, "function", "mixed_bfloat16")
    actual = {where: np.asarray(array) for where, array in run().items()}
    assert not any(judge.failure(where, array) for where, array in actual.items())
    with np.errstate(all="ignore"):
        found = judge.failure("[0]['w1']", planted(actual["[0]['w1']"]))
    assert found and found.kind == kind


def test_a_program_that_hangs_on_a_tie_is_not_judged():
    tie = (Op("v1", "shift", ("x0",), (("c", 100.0),)), Op("v3", "sort", ("v1",)))
    assert not Judge(dataclasses.replace(SMALL, ops=tie), "bfloat16").is_usable


@pytest.mark.slow
def test_a_failure_is_minimized_and_printed(monkeypatch):
    """Under a planted fault of tanh, a program is reduced to it."""
    ops = (
        Op("v1", "matmul", ("x0", "w1")),
        Op("v2", "tanh", ("v1",)),
        Op("v3", "relu", ("v2",)),
        Op("v4", "cumsum", ("v3",), (("axis", 0),)),
    )
    program = dataclasses.replace(SMALL, ops=ops, output="v4")
    monkeypatch.setattr(judging, "built", lambda program, way, policy: planted(program))

    def planted(program):
        names = judging.namespace()
        exec(source(program).replace("tanh(", "1.2 * tanh("), names)
        return names["f"]

    fails = lambda candidate: bool(judging.failures(candidate, "function", "mixed_bfloat16"))  # noqa: E731
    small = minimized(program, fails)
    assert [op.kind for op in small.ops] == ["tanh"]
    script = snippet(small, "function", "mixed_bfloat16", "eager", "value")
    assert "tanh(" in script and "mpmodules.autocast(f, POLICY)" in script
    exec(compile(script, "script", "exec"), {})


@pytest.mark.slow
def test_the_command_reports_counts(capsys):
    chosen = ["--seed", "3", "--n", "1", "--class", "function", "--policy", "bfloat16"]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert main(chosen) == 0
    assert "1 programs  function     bfloat16" in capsys.readouterr().out
    assert jnp.zeros(()).dtype == jnp.float32
