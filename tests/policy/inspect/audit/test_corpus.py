"""The corpus: faults are seen wherever users write them, and clean programs have no findings.

Nothing runs: programs are traced.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

import mpmodules
from policy import audit
from policy.inspect.audit.findings import CARRY, FINDING_KINDS, PRECISION
from tests.policy.inspect.audit.corpus import (
    carries,
    constants,
    discrete,
    eight_bits,
    functions,
    networks,
    sums,
    widening,
)
from tests.policy.inspect.audit.corpus.planting import CLEAN, FAULTS, Program, places_of

assert mpmodules  # names the modules of nnx
assert carries and constants and discrete and eight_bits  # add to the corpus
assert functions and networks and sums and widening

NOT_SEEN = {
    "a linear recurrence by a scan of pairs",
    "a place in a sorted array",
    "a rare event among a hundred",
    "steps of Euler's by a function of the state",
}
"""Faults of the corpus that an audit misses, by their names."""

FLAGGED: set[str] = set()
"""Clean programs of the corpus that an audit reports."""


def audited(run: Any, program: Program, backward: bool) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return audit(run, *program.args, backward=backward)


def is_seen(program: Program, run: Any) -> bool:
    findings = audited(run, program, program.backward).findings
    if program.states is not None:
        found = [one for one in findings if one.kind == CARRY]
        by_state = {one.message.partition(",")[0]: one.primitive for one in found}
        return by_state == program.states and {one.path for one in found} == {"inner"}
    return any(
        (one.kind, one.path) == (program.kind, "inner")
        and program.primitive in ("any", one.primitive)
        for one in findings
    )


@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[one.name for one in FAULTS])
def test_a_fault_is_seen_in_all_its_places(place):
    fault = FAULTS[place]
    missed = [name for name, run in places_of(fault, place).items() if not is_seen(fault, run)]
    assert bool(missed) == (fault.name in NOT_SEEN), missed


@pytest.mark.parametrize("place", range(len(CLEAN)), ids=[one.name for one in CLEAN])
def test_a_clean_program_has_no_finding_in_any_place(place):
    program = CLEAN[place]
    runs = places_of(program, place)
    found = {name: audited(run, program, False).findings for name, run in runs.items()}
    if program.backward:
        found["gradients"] = audited(program.run, program, True).findings
    assert any(found.values()) == (program.name in FLAGGED), found


def test_the_share_that_is_seen_and_flagged():
    planted = Counter(fault.kind for fault in FAULTS)
    assert set(FINDING_KINDS) - set(planted) == {PRECISION}  # test_asked.py
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 312
    assert len(CLEAN) == len({program.name for program in CLEAN}) == 193
    assert len(NOT_SEEN) / len(FAULTS) <= 5 / 155 and len(FLAGGED) <= 1
