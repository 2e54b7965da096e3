"""An estimate's figures, as JSON and as text."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest

from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import Buffer, Exchange, PolicyCost
from policy.inspect.estimate.text import estimate_text
from tests.policy.inspect.estimate.estimates import (
    GIB,
    buffer,
    cost,
    estimate_of,
    half,
    hostile,
    lacking,
    not_compiled,
    on_one_gpu,
)

CODES = re.compile(r"\x1b\[\d*m")


def line_of(text: str, start: str, heading: str) -> str:
    """Returns the words of a row in the table that has a heading."""
    table = next(part for part in text.split("\n\n") if heading in part.splitlines()[0])
    line = next(line for line in table.splitlines() if line.startswith(f"  {start}"))
    return " ".join(line.split()[1:])


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


def test_exchanges_beside_kernels_take_the_time_that_is_left():
    row = cost(overlapped_seconds=0.81)
    assert (row.seconds, row.sequential_seconds) == (0.81, pytest.approx(0.82))
    text = str(estimate_of(row, half()))
    assert "seconds in sequence" in " ".join(text.split())
    assert "810 ms 820 ms" in line_of(text, "float32", "in sequence")
    assert "in sequence" not in str(estimate_of(cost(overlapped_seconds=0.82), half()))


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
    assert list(read) == ["version", *names, "front"] and read["version"] == 1
    assert read["mesh"] == {"data": 4, "model": 4} and read["notes"] == ["A note."]
    row = read["rows"][0]
    names = [field.name for field in dataclasses.fields(PolicyCost)]
    derived = ["fits", "spare", "exchange_seconds", "seconds", "sequential_seconds"]
    derived += ["seconds_per_example", "mfu", "is_lower_bound"]
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
    infinite, unknown = float("inf"), float("nan")
    odd = cost(bytes=infinite, cycles=unknown, memory=np.int64(3), flops={"f": np.float64(2)})
    row = json.loads(estimate_of(odd).to_json(), parse_constant=pytest.fail)["rows"][0]
    assert (row["bytes"], row["cycles"], row["memory"], row["flops"]) == (None, None, 3, {"f": 2.0})


def test_the_head_says_what_was_estimated_and_by_what():
    head = """\
estimate of train.py:example: 2 of 3 policies fit
  target    v5e:4x4: 16 devices of 16 GiB of memory each; mesh data=4, model=4
  seconds   the compiler's cycles at an assumed clock of 1.5 GHz
  figures   Google Cloud, TPU v5e: system architecture
  compiler  jax 0.10.2, libtpu 0.0.17
  counts    FLOPs are of all devices together, all other figures per device

"""
    assert str(estimate_of(cost(), lacking(), half())).startswith(head)


def test_a_row_has_its_figures_and_ratios_beside_the_first():
    text = str(estimate_of(cost(), half()))
    expected = {
        ("float32", "memory"): "fits, 4 GiB spare 12 GiB 6 GiB 5 GiB 1 GiB",
        ("mixed_bfloat16", "memory"): "fits, 10 GiB spare 6 GiB x0.50 6 GiB 5 GiB 1 GiB",
        ("mixed_bfloat16", "seconds"): "4 T in bf16 97.5%, f32 2.5% 40 GiB x0.50 600 M 410 ms "
        "x0.50 1 GiB x0.50",
    }
    assert {key: line_of(text, *key) for key in expected} == expected


def test_a_row_that_lacks_memory_says_how_much_and_what_takes_it():
    text = str(estimate_of(cost(), lacking()))
    assert "lacks 4 GiB" in line_of(text, "float64", "memory")
    assert "largest buffers of float64, which lacks 4 GiB" in text
    place = "Transformer/head  train.py:41 (loss_fn)"
    assert f"     3 GiB  f32[8,2048,50257]  temporary of dot_general  {place}" in text
    assert "     1 GiB  f32[8,2048,50257]  argument  args[0]\n" in f"{text}\n"
    assert "largest buffers" not in str(estimate_of(cost(buffers=(buffer(),))))
    many = estimate_of(lacking(buffers=(buffer(),) * 11))
    assert "  3 more in to_json()" in str(many)
    assert str(many).count("f32[8,2048,50257]") == 8


def test_a_row_that_the_compiler_gave_up_does_not_fit_and_has_no_figures():
    text = str(estimate_of(cost(), not_compiled()))
    lines = [line for line in text.splitlines() if line.startswith("  given up")]
    figures = " ".join(" ".join(lines).replace("given up", "").split())
    assert figures == "does not fit — — — — 4 T in f32 — — — —"


def test_a_lower_bound_of_seconds_names_what_it_leaves_out():
    exchange = Exchange("all-reduce", "float32", 8.0, None)
    unknown = cost("unknown", collectives=(exchange,), uncounted=("sorts", "a"))
    text = str(estimate_of(cost(uncounted=("a",)), unknown, notes=("Why.",)))
    assert "≥ 800 ms" in line_of(text, "unknown", "seconds")
    assert "GHz; ≥ where some costs are not counted" in text
    assert text.endswith("not counted\n  a\n  sorts (unknown)\nnotes\n  Why.")
    assert re.search(r"all-reduce +f32 +8 B +—\n", text)


@pytest.mark.parametrize("absent", ["cycles  ", "exchanges", "fits", "≥", "counts", "compiler"])
def test_columns_and_facts_that_no_row_has_are_left_out(absent):
    text = str(on_one_gpu())
    assert absent not in text.replace("neither cycles nor", "")
    assert "1 device of an unknown amount of memory\n  seconds   unknown: this device has" in text


def test_no_line_is_longer_than_the_terminal_and_no_name_moves_its_cursor():
    for found in (hostile(), estimate_of(*[cost(f"row {i}") for i in range(9)]), on_one_gpu()):
        text = str(found)
        assert max(map(len, text.splitlines())) <= 100
        assert "\x1b" not in text
    text = str(hostile())
    assert r"\x1b[31m" in text and "none" in text and text.count("n" * 90) >= 2


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_colors_unless_no_color_is_set(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = estimate_of(cost(), lacking())
    terminal = _Terminal()
    found.show(terminal)
    shown = terminal.getvalue()
    assert "\x1b[31mlacks 4 GiB" in shown and "\x1b[32mfits, 4 GiB spare" in shown
    assert CODES.sub("", shown) == f"{found}\n"
    assert estimate_text(found, color=True) == shown.removesuffix("\n")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = _Terminal()
    found.show(terminal)
    assert terminal.getvalue() == f"{found}\n"
    found.show()
    assert capsys.readouterr().out == f"{found}\n"
