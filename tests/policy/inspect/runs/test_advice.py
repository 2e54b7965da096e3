"""Advice names what goes wrong, where and when, and keeps silent about what is normal."""

import pytest

from policy.inspect.runs.advice import ADVICE_KINDS, advise
from tests.policy.inspect.runs.hand_made import first, record, row, run_of

KERNEL = "params/block/kernel"


def kinds(records):
    return {one.kind: one for one in advise(records)}


def lost(share, dtype="bfloat16"):
    return run_of(
        lambda step: row(KERNEL, "param", dtype), lambda step: row(KERNEL, "update", lost=share)
    )


FAULTS = {
    "vanished-updates": (KERNEL, 0, lost(0.9)),
    "underflow": (
        "block",
        0,
        run_of(lambda step: row("block", "cotangent", "float16", zeros=0.5, below=0.4)),
    ),
    "dead-module": ("block", 1, run_of(
        lambda step: row("block", zeros=1.0), lambda step: row(KERNEL, "update"))),
    "saturated-codes": ("block", 4, run_of(
        lambda step: row("block", "codes", "float8_e4m3fn", above=[0.0, 0.3 * (step > 3)]))),
    "lost-codes": ("block", 0, run_of(lambda step: row("block", "codes", "int8", below=0.9))),
    "near-overflow": ("block", 5, run_of(
        lambda step: row("block", "activation", "float16", largest=1000 * 1.5**step))),
    "bad-batch": ("x", 7, run_of(
        lambda step: row("x", "input", largest=50.0 if step == 7 else 1.0))),
    "update-spike": (KERNEL, 6, run_of(
        lambda step: row(KERNEL, "update", mean_square=900.0 if step == 6 else 1.0),
        lambda step: row(KERNEL, "gradient"))),
    "no-updates": ("", 0, run_of(
        lambda step: row(KERNEL, "update", largest=0.0), lambda step: row(KERNEL, "gradient"))),
    "float16-overflow": ("block", 3, [record(3, found=first("block"))]),
    "division-by-zero": ("", 3, [record(3, found=first("", "div", direction="update"))]),
    "not-finite": ("block", 3, [record(3, found=first("block", dtype="bfloat16"))]),
    "params-not-finite": (
        "block", 0, [record(0, row(KERNEL, "param"), found=first("block", entered=KERNEL))]),
    "bad-device": ("block", 2, [
        record(step, found=first("block", devices=[3], direction="backward")) for step in (2, 5)]),
    "loss-scale": ("block", 1, [
        record(step, found=first("block", direction="backward"), scale=1.0, skipped=True)
        for step in range(1, 9)]),
    "many-skips": ("block", 32, [
        record(step, found=first("block", direction="backward"), scale=2.0 ** (step % 3 + 1),
               skipped=True) for step in range(0, 60, 4)]),
}  # fmt: skip


def test_every_kind_has_a_run_here():
    assert set(FAULTS) == set(ADVICE_KINDS)


@pytest.mark.parametrize("kind", FAULTS)
def test_advice_names_the_kind_the_path_and_the_first_step(kind):
    path, step, records = FAULTS[kind]
    found = kinds(records)[kind]
    assert (found.path, found.step) == (path, step)
    assert found.until <= records[-1]["step"] and found.message.endswith(".")


def test_advice_says_line_layers_examples_and_devices():
    where = first("layers", layer=3, examples=[4, 7], devices=[1])
    (found,) = advise([record(9, found=where)])
    assert found.line == "model.py:31" and found.layers == (3,)
    assert "in examples 4 to 7 on device 1" in found.message
    (found,) = advise(FAULTS["saturated-codes"][2])
    assert found.layers == (1,)


def test_the_gravest_kind_is_first():
    assert advise([*lost(0.9), record(20, found=first("block"))])[0].kind == "float16-overflow"


NOT_BY_HISTORY = {one for one in FAULTS if FAULTS[one][2][0]["first"]} - {"many-skips"}


@pytest.mark.parametrize("kind", sorted({*FAULTS} - NOT_BY_HISTORY))
def test_the_first_record_alone_has_no_advice(kind):
    assert not advise(FAULTS[kind][2][:1])


def test_params_that_are_not_finite_afterwards_are_a_consequence():
    later = [
        record(step, row(KERNEL, "param"), found=first("block", "dot_general", entered=KERNEL))
        for step in (4, 5)
    ]
    assert [one.step for one in advise([record(3, found=first("block")), *later])] == [3]


CLEAN = {
    "updates of float32 params": lost(0.9, "float32"),
    "a warm-up from 0": run_of(
        lambda step: row(KERNEL, "update", largest=float(step), mean_square=float(step), lost=0.0),
        lambda step: row(KERNEL, "gradient"),
    ),
    "a sparse gradient": run_of(lambda step: row("table", "gradient", "float32", zeros=0.99)),
    "a relu": run_of(lambda step: row("relu", "activation", "float16", zeros=0.8)),
    "a frozen param": run_of(
        lambda step: row(KERNEL, "update", "float16", zeros=1.0, largest=0.0),
        lambda step: row("params/head/kernel", "update", "float16"),
        lambda step: row(KERNEL, "gradient", "float16"),
    ),
    "a mask of the limit": run_of(lambda step: row("mask", "activation", "float16", largest=65504)),
    "a branch that starts at 0": run_of(
        lambda step: row("branch", zeros=float(step == 0)), lambda step: row(KERNEL, "update")
    ),
    "a loss scale that settles": [
        record(step, found=first("block", direction="backward"), scale=2.0 ** (15 - step),
               skipped=True) for step in range(8)] + run_of(scale=256.0, steps=30),
    "a scale of 8 bits from the largest of four": run_of(
        lambda step: row("block", "codes", "int8", above=1 / 4)),
    "a scale of 8 bits from the largest": run_of(
        lambda step: row("block", "codes", "int8", above=1 / 64, below=0.02)),
    "restarts of a schedule": run_of(
        lambda step: row(KERNEL, "update", mean_square=10.0 ** -(step % 5)), steps=20),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_normal_run_has_no_advice(name):
    assert advise(CLEAN[name]) == ()
