"""Advice names what the records prove, with its place and time, and nothing else."""

import pytest

from policy.inspect.runs.advice import ADVICE_KINDS, advise
from tests.policy.inspect.runs.hand_made import entered, made, record, row, run_of

KERNEL = "params/block/kernel"


def kinds(records):
    return {one.kind: one for one in advise(records)}


def lost(share, dtype="bfloat16"):
    return run_of(
        lambda step: row(KERNEL, "param", dtype, largest=float(step)),
        lambda step: row(KERNEL, "update", lost=share),
    )


BACKWARD = made("block", direction="backward")
FAULTS = {
    "vanished-updates": (KERNEL, 0, lost(0.9)),
    "underflow": (
        "block",
        0,
        run_of(lambda step: row("block", "cotangent", "float16", zeros=0.5, below=0.4)),
    ),
    "no-updates": (
        "clip",
        1,
        [
            record(step, *(row(KERNEL, kind) for kind in ("param", "gradient")),
                   found=made("clip"), finite=True)
            for step in range(10)
        ],
    ),
    "overflow": ("block", 3, [record(3, found=made("block"))]),
    "division-by-zero": ("", 3, [record(3, found=made("", "div", direction="update"))]),
    "not-finite": ("block", 3, [record(3, found=made("block", "sin", value="nan"))]),
    "input-not-finite": ("x", 4, [record(3), record(4, found=entered("x"))]),
    "state-not-finite": ("block", 0, [record(0, found=entered("block", "param"))]),
    "loss-scale": (
        "block", 1,
        [record(step, found=BACKWARD, scale=1.0, skipped=True) for step in range(1, 9)]),
}  # fmt: skip


def test_every_kind_has_a_run_here():
    assert set(FAULTS) == set(ADVICE_KINDS)


@pytest.mark.parametrize("kind", FAULTS)
def test_advice_names_the_kind_the_path_and_the_first_step(kind):
    path, step, records = FAULTS[kind]
    found = kinds(records)[kind]
    assert (found.path, found.step) == (path, step)
    assert found.until <= records[-1]["step"] and found.message.endswith(".")


def test_advice_says_line_and_layers():
    (found,) = advise([record(9, found=made("layers", layer=3))])
    assert found.line == "model.py:31" and found.layers == (3,)


@pytest.mark.parametrize(
    ("operation", "value", "cause"),
    [("rsqrt", "nan", "negative"), ("log", "inf", "is 0"), ("div", "nan", "both operands are 0")],
)
def test_a_division_is_told_by_what_it_made(operation, value, cause):
    (found,) = advise([record(1, found=made("norm", operation, value=value))])
    assert found.kind == "division-by-zero" and cause in found.message


def test_casts_to_8_bits_exceed_their_range():
    cast = made("head", "convert_element_type", dtype="float8_e4m3fn", value="nan")
    (found,) = advise([record(1, found=cast)])
    assert found.kind == "overflow" and "exceeds 448" in found.message


def test_the_gravest_kind_is_first():
    assert advise([*lost(0.9), record(20, found=made("block"))])[0].kind == "overflow"


def test_what_is_not_finite_in_finite_steps_is_no_cause():
    mask, where = entered("mask"), made("masked", "log")
    clean = [record(step, found=[mask, where], finite=True) for step in range(3)]
    assert advise(clean) == ()
    (found,) = advise([*clean, record(4, found=[mask, where, made("block", line="model.py:50")])])
    assert (found.kind, found.path) == ("overflow", "block")


def test_params_that_are_not_finite_afterwards_are_a_consequence():
    later = [record(step, found=entered(KERNEL, "param")) for step in (4, 5)]
    assert [one.step for one in advise([record(3, found=made("block")), *later])] == [3]


def test_an_operation_that_overflows_again_is_one_advice():
    found = made("block")
    (one,) = advise([record(2), record(3, found=found), record(5), record(6, found=found)])
    assert (one.step, one.until) == (3, 6) and "In 2 steps until 6." in one.message


def test_params_that_are_not_finite_between_records_are_told_so():
    (found,) = advise([record(0), record(100, found=entered(KERNEL, "param"))])
    assert found.kind == "state-not-finite" and "one, 0." in found.message


CLEAN = {
    "updates of float32 params": lost(0.9, "float32"),
    "a sparse gradient": run_of(lambda step: row("table", "gradient", "float32", zeros=0.99)),
    "a module of zeros": run_of(lambda step: row("relu", "activation", "float16", zeros=1.0)),
    "a frozen param": run_of(
        lambda step: row(KERNEL, "param"),
        lambda step: row("params/head/kernel", "param", mean_square=float(step)),
        lambda step: row(KERNEL, "gradient", "float16"),
    ),
    "a spike of a batch": run_of(lambda step: row("x", "input", largest=1e4 if step == 7 else 1.0)),
    "updates of 0 in recorded steps, as of MultiSteps": run_of(
        lambda step: row(KERNEL, "update", zeros=1.0, largest=0.0),
        lambda step: row(KERNEL, "param", mean_square=float(step)),
        lambda step: row(KERNEL, "gradient"), steps=20),
    "a loss scale that settles": [
        record(step, found=BACKWARD, scale=2.0 ** (15 - step), skipped=True)
        for step in range(8)] + run_of(scale=256.0, steps=30),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_normal_run_has_no_advice(name):
    assert advise(CLEAN[name]) == ()
