"""The accuracy table holds on small shapes, and judges as it says it does."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy import cases, report
from benchmarks.accuracy.cases import BFLOAT16, FLOAT16, FLOAT32, Case, measure
from benchmarks.accuracy.ulps import max_ulps

# Left to the command, which is slower: the like of what is here, and what half the compilations
# would go into.
SKIPPED = re.compile(
    r"General|Einsum|ConvLocal|Transpose|LoRA|RNN|MultiHead|(attention|ctc_loss) \(large"
    r"|(ctc_loss|with_log).* from"
    r"|Norm(, training)? \(normal|Norm.*(gradient of bias|float32\), bfloat16| from bfloat16)"
    r"|(Weight|Spectral).* bfloat16"
)


def _chosen() -> Any:
    for case, precision in accuracy.selected(small=True):
        name = f"{case}, {precision}"
        if SKIPPED.search(name) or (case.family == "matmuls" and precision == FLOAT16):
            continue
        yield pytest.param(dataclasses.replace(case, torch=None), precision, id=name)


@pytest.mark.cases(fast=1, slow=11)
@pytest.mark.parametrize(("case", "precision"), list(_chosen()))
def test_ours_is_within_its_bound_and_no_worse_than_upstream(case, precision):
    assert report.complaints(measure(case, precision)) == []


def test_what_is_not_finite_is_infinitely_wrong_where_the_truth_is():
    for wrong in (np.inf, np.nan):
        assert max_ulps(np.array([wrong, 1.0]), np.array([1.0, 1.0]), jnp.float16) == np.inf
    # Beyond float16 for anybody.
    assert max_ulps(np.array([np.inf]), np.array([1e6]), jnp.float16) == 0
    assert max_ulps(np.array([6e4]), np.array([1e6]), jnp.float16) == np.inf
    with pytest.raises(ValueError, match=r"should be of shape \(1,\), but is of shape \(2,\)"):
        max_ulps(np.zeros(2), np.zeros(1), jnp.float16)


def _doubling(upstream: Any = None, ours: Any = None, **rest: Any) -> Case:
    exactly = lambda precision, x: x + x  # noqa: E731
    columns = {"ours": ours or exactly, "jax, optax": upstream or exactly}
    return Case("doubling", "normal", "sums", cases.normal(64), columns, exactly, **rest)


def _off(ulps: float) -> Any:
    return lambda precision, x: (x + x) * (1 + ulps * jnp.finfo(x.dtype).eps).astype(x.dtype)


@pytest.mark.slow
def test_a_row_is_held_against_its_promise_and_against_the_best_of_the_others():
    assert report.complaints(measure(_doubling(), BFLOAT16)) == []
    promise, best = report.complaints(measure(_doubling(ours=_off(4)), BFLOAT16))
    assert re.search(r"ulps, where sums are to be within 1$", promise)
    assert re.search(r"ulps, where the best of the others has 0$", best)
    assert report.complaints(measure(_doubling(upstream=_off(4)), BFLOAT16)) == []
    rounded = _doubling(ours=lambda precision, x: (x * x).astype(x.dtype).astype(jnp.float32))
    assert len(report.complaints(measure(rounded, FLOAT32))) == 2


def test_the_command_prints_writes_and_says_by_its_status_whether_all_rows_hold(
    monkeypatch, capsys, tmp_path
):
    table, figures = tmp_path / "accuracy.md", tmp_path / "accuracy.json"
    monkeypatch.setattr(accuracy, "layer_cases", lambda small: [])
    monkeypatch.setattr(accuracy, "function_cases", lambda small: [_doubling()])
    assert accuracy.main(["--json", str(figures), "--markdown", str(table)]) == 0
    assert "All 2 rows are within their bounds." in capsys.readouterr().out
    page = table.read_text()
    assert "| Bfloat16, functions | 1 | 0.00 | 0.00 |" in page and "doubling" not in page
    assert f"jax {jax.__version__}" in page
    rows = json.loads(figures.read_text())["rows"]
    assert [row["precision"] for row in rows] == ["bfloat16", "float16"]
    assert rows[0]["ulps"] == {"ours": 0.0, "jax, optax": 0.0} and rows[0]["complaints"] == []

    assert accuracy.main(["--only", "nothing"]) == 2
    assert "No row matches --only 'nothing'." in capsys.readouterr().out

    monkeypatch.setattr(accuracy, "function_cases", lambda small: [_doubling(ours=_off(4))])
    assert accuracy.main(["--only", ", float16"]) == 1
    out = capsys.readouterr().out
    for text in ("1 of 1 rows miss a bound:", "- doubling (normal), float16: ", "WORSE"):
        assert text in out
