"""An estimate's figures, JSON and files."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import Buffer, Exchange, PolicyCost
from tests.policy.inspect.estimate.estimates import (
    GIB,
    cost,
    estimate_of,
    half,
    hostile,
    lacking,
    not_compiled,
    on_one_gpu,
)


def test_a_row_fits_lacks_memory_or_is_unknown():
    assert (cost().fits, cost().spare) == (True, 4 * GIB)
    assert (lacking().fits, lacking().spare) == (False, -4 * GIB)
    assert (cost(capacity=0).fits, cost(capacity=0).spare) == (None, None)
    assert not_compiled().fits is False


def test_seconds_are_of_kernels_and_exchanges_and_a_lower_bound_without_either():
    assert cost().seconds == pytest.approx(0.82) and not cost().is_lower_bound
    unknown = cost(collectives=(Exchange("all-reduce", "float32", 8.0, None),))
    assert (unknown.exchange_seconds, unknown.seconds, unknown.is_lower_bound) == (None, 0.8, True)
    assert cost(uncounted=("a callback",)).is_lower_bound
    assert cost(compute_seconds=None).seconds is None


def test_a_row_is_found_by_its_name():
    found = estimate_of(cost(), half())
    assert found["mixed_bfloat16"] is found.rows[1]
    assert found["f32"] is found.rows[0] and found["p=f32,c=bf16,o=f32"] is found.rows[1]
    with pytest.raises(KeyError, match=r"no row 'bf16'. Rows: float32, mixed_bfloat16."):
        found["bf16"]


def test_json_has_every_attribute_and_the_derived_figures():
    found = estimate_of(lacking(), half(), notes=("A note.",))
    read = json.loads(found.to_json())
    names = [field.name for field in dataclasses.fields(Estimate)]
    assert list(read) == ["version", *names] and read["version"] == 1
    assert read["mesh"] == {"data": 4, "model": 4} and read["notes"] == ["A note."]
    row = read["rows"][0]
    names = [field.name for field in dataclasses.fields(PolicyCost)]
    derived = ["fits", "spare", "exchange_seconds", "seconds", "is_lower_bound"]
    assert list(row) == [*names, *derived]
    assert (row["fits"], row["spare"], row["is_lower_bound"]) == (False, -4 * GIB, False)
    assert row["seconds"] == pytest.approx(0.82) and row["exchange_seconds"] == 0.02
    assert row["collectives"] == [dataclasses.asdict(found.rows[0].collectives[0])]
    assert row["buffers"][0]["shape"] == [8, 2048, 50257]
    assert list(row["buffers"][0]) == [field.name for field in dataclasses.fields(Buffer)]
    assert "\n" not in found.to_json(indent=None)


def test_json_has_null_for_what_is_unknown_and_no_infinities():
    read = json.loads(on_one_gpu().to_json())["rows"][0]
    assert [read[name] for name in ("cycles", "seconds", "fits", "spare")] == [None] * 4
    odd = cost(
        bytes=float("inf"), cycles=float("nan"), memory=np.int64(3), flops={"f": np.float64(2)}
    )
    row = json.loads(estimate_of(odd).to_json(), parse_constant=pytest.fail)["rows"][0]
    assert (row["bytes"], row["cycles"], row["memory"], row["flops"]) == (None, None, 3, {"f": 2.0})


@pytest.mark.parametrize("ending", ["json", "html"])
def test_an_estimate_is_saved_by_the_name_of_its_file(tmp_path: pathlib.Path, ending):
    found = hostile()
    found.save(tmp_path / f"cost.{ending}")
    text = (tmp_path / f"cost.{ending}").read_text(encoding="utf-8")
    assert text == (found.to_json() if ending == "json" else found.to_html())
    with pytest.raises(ValueError, match=r"saved as .html, .json, .png or .svg, but got '.*.txt'"):
        found.save(tmp_path / "cost.txt")
