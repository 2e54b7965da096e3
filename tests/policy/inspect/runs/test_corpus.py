"""Faults that are planted in training runs are named by module, step and line; clean runs are not.

python -m tests.policy.inspect.runs.test_corpus    # prints the table: some minutes
"""

import sys
from pathlib import Path

import jax
import pytest

import mpmodules
from policy.inspect.runs.advice import Advice, advise
from tests.policy.inspect.runs.corpus import clean, not_finite, of_numbers, on_eight_devices
from tests.policy.inspect.runs.corpus.training import CLEAN, FAULTS, Case

assert mpmodules  # names modules
assert clean and not_finite and of_numbers and on_eight_devices  # add to the corpus

NOT_NAMED: set[str] = set()
"""Faults whose advice misses the kind, the module, the step or the line, by their names."""

FLAGGED: set[str] = set()
"""Clean runs that have advice."""


def advice_on(case: Case) -> tuple[Advice, ...]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return advise(case.run())


def is_named(case: Case, found: Advice) -> bool:
    if found.kind not in case.kind.split() or found.step != case.step:
        return False
    if not any(found.path == path or (path and found.path.endswith(path)) for path in case.path):
        return False
    if case.layer is not None and found.layers != (case.layer,):
        return False
    return not case.line or case.line in text_of(found.line)


def text_of(line: str) -> str:
    """Returns the text of a line of code that is named as ``file.py:12``."""
    file, _, number = line.partition(":")
    files = [one for one in Path(__file__).parent.glob("corpus/*.py") if one.name == file]
    return files[0].read_text().splitlines()[int(number) - 1] if files else ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cpu has no .* matmuls")
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_fault_is_named(case):
    found = advice_on(case)
    assert any(is_named(case, one) for one in found) == (case.name not in NOT_NAMED), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cpu has no .* matmuls")
@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_a_clean_run_has_no_advice(case):
    assert bool(advice_on(case)) == (case.name in FLAGGED)


def test_the_shares_that_are_named_and_flagged():
    assert len(FAULTS) - len(NOT_NAMED) >= 38 and len(CLEAN) >= 20 and not FLAGGED
    assert {case.name for case in FAULTS} >= NOT_NAMED


def main(names: list[str]) -> None:
    """Prints what is advised on each run, and the counts."""
    counts = {"faults": [0, 0], "clean runs": [0, 0]}
    for what, cases in (("faults", FAULTS), ("clean runs", CLEAN)):
        for case in cases:
            if names and not any(name in case.name for name in names):
                continue
            try:
                found = advice_on(case)
            except Exception as error:  # the table goes on
                print(f"ERROR  {case.name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            named = [one for one in found if is_named(case, one)] if case.kind else found
            counts[what][0] += bool(named)
            counts[what][1] += 1
            shown = named[:1] if named else found[:4]
            mark = "     " if bool(named) == bool(case.kind) else "MISS "
            told = "; ".join(f"{o.kind} {o.path} {o.step} {o.line} {o.layers}" for o in shown)
            print(f"{mark}  {case.name}: {told}", flush=True)
    print({what: f"{named} of {of}" for what, (named, of) in counts.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
