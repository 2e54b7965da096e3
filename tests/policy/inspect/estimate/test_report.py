"""An estimate's figures, JSON and files; as text, as a page and as a plot."""

import dataclasses
import io
import json
import pathlib
import re
import sys

import numpy as np
import pytest

from policy.inspect.estimate.html import estimate_page
from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import Buffer, Exchange, PolicyCost
from policy.inspect.estimate.text import estimate_text
from tests.policy.inspect.audit.test_page import Elements, all_of
from tests.policy.inspect.estimate.estimates import (
    GIB,
    HOSTILE,
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


@pytest.mark.parametrize("ending", ["json", "html"])
def test_an_estimate_is_saved_by_the_name_of_its_file(tmp_path: pathlib.Path, ending):
    found = hostile()
    found.save(tmp_path / f"cost.{ending}")
    text = (tmp_path / f"cost.{ending}").read_text(encoding="utf-8")
    assert text == (found.to_json() if ending == "json" else found.to_html())
    with pytest.raises(ValueError, match=r"saved as .html, .json, .png or .svg, but got '.*.txt'"):
        found.save(tmp_path / "cost.txt")


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
    assert "  3 more in to_html() and to_json()" in str(many)
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


def test_a_terminal_has_colours_unless_no_color_is_set(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = estimate_of(cost(), lacking())
    terminal = _Terminal()
    found.show(terminal)
    shown = terminal.getvalue()
    assert "\x1b[31mlacks 4 GiB" in shown and "\x1b[32mfits, 4 GiB spare" in shown
    assert CODES.sub("", shown) == f"{found}\n"
    assert estimate_text(found, colour=True) == shown.removesuffix("\n")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = _Terminal()
    found.show(terminal)
    assert terminal.getvalue() == f"{found}\n"
    found.show()
    assert capsys.readouterr().out == f"{found}\n"


def test_the_page_has_every_part():
    found = estimate_of(cost(uncounted=("sorts",)), lacking(), half(), notes=("A note.",))
    elements = Elements(estimate_page(found))
    assert not elements.open
    headings = ["Policies (3)", "Memory of a device", "FLOPs by dtype", "Exchanges between devices"]
    places = [elements.text.index(part) for part in [*headings, "Largest buffers", "Modules"]]
    assert places == sorted(places)
    figures = ("2 of 3 policies fit.", "lacks 4 GiB", "fits, 10 GiB spare", "≥ 820 ms", "x0.50")
    names = ("97.5%", "train.py:41 (loss_fn)", "Transformer/head", "sorts (float32)", "A note.")
    line = "The dashed line is the device's memory, 16 GiB."
    assert [part for part in (*figures, *names, line) if part not in elements.text] == []
    assert found.to_html() == estimate_page(found)


def test_bars_of_memory_stand_against_the_capacity():
    page = estimate_page(estimate_of(lacking(arguments=8 * GIB, temporaries=12 * GIB, outputs=0)))
    pieces = [one for one in all_of(Elements(page), "span") if "style" in one]
    memory = {one["class"]: one["style"] for one in pieces if "float" not in str(one["class"])}
    assert memory["piece arguments"] == "width:40.0000%"
    assert memory["piece temporaries"] == "width:60.0000%"
    assert memory["capacity"] == "left:80.0000%" and "piece outputs" not in memory
    small = cost(memory=5 * GIB, arguments=4 * GIB, temporaries=GIB, outputs=0, code=0)
    page = estimate_page(estimate_of(lacking(), small))
    assert 'class="piece arguments" style="width:20.0000%"' in page


def test_numbers_sort_by_their_size_and_unknown_ones_by_nothing():
    elements = Elements(estimate_page(estimate_of(cost(), not_compiled())))
    cells = [cell for cell in all_of(elements, "td") if cell["data-label"] == "seconds"]
    assert float(cells[0]["data-value"]) == pytest.approx(0.82) and "data-value" not in cells[1]


def test_columns_and_sections_that_no_row_has_are_left_out_of_the_page():
    elements = Elements(estimate_page(on_one_gpu()))
    labels = {cell["data-label"] for cell in all_of(elements, "td")}
    assert {"policy", "memory", "bytes", "kernels"} <= labels
    assert not labels & {"fits", "cycles", "seconds", "exchanges"}
    assert "Exchanges" not in elements.text and "Modules" not in elements.text
    assert "dashed" not in elements.text and "capacity" not in str(all_of(elements, "span"))
    assert "Remarks" not in elements.text


def test_hostile_names_are_text_on_the_page():
    elements = Elements(estimate_page(hostile()))
    assert not elements.open and len(all_of(elements, "script")) == 1
    assert HOSTILE in elements.text and "FLOPs of matmuls: none" in elements.text
    assert "lacks 1 TiB" not in elements.text and "does not fit" in elements.text


def bars(axes) -> dict[str, list[float]]:
    return {c.get_label(): [round(bar.get_width(), 3) for bar in c] for c in axes.containers}


@pytest.mark.slow  # imports matplotlib
def test_the_plot_stacks_memory_beside_the_capacity_and_seconds():
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    figure = estimate_of(cost(), half(uncounted=("sorts",))).plot()
    memory, seconds = figure.axes
    assert bars(memory) == {"arguments": [6, 6], "temporaries": [5, 5], "outputs": [1, 1]}
    assert [np.asarray(line.get_xdata())[0] for line in memory.lines] == [16.0]
    assert memory.get_xlabel() == "memory of a device, GiB"
    assert bars(seconds) == {"compute": [800, 400], "exchanges": [20, 10]}
    assert seconds.get_xlabel() == "time by the compiler's cycles, ms"
    assert [text.get_text() for text in seconds.texts] == [" or more"]
    assert [tick.get_text() for tick in memory.get_yticklabels()] == ["float32", "mixed_bfloat16"]


@pytest.mark.slow  # imports matplotlib
def test_the_plot_of_unknown_seconds_has_memory_alone_and_names_are_no_mathematics():
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    [memory] = on_one_gpu().plot().axes
    assert not memory.lines and set(bars(memory)) == {"arguments", "temporaries", "outputs"}
    memory, seconds = estimate_of(cost("$x_1$ \x1b"), not_compiled()).plot().axes
    assert [text.get_text() for text in seconds.texts] == [" unknown"]
    assert [tick.get_text() for tick in memory.get_yticklabels()] == [r"\$x_1\$ ", "given up"]


@pytest.mark.slow  # imports matplotlib
@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_saved_without_a_window(tmp_path, ending, start):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    hostile().save(tmp_path / f"cost.{ending}")
    assert (tmp_path / f"cost.{ending}").read_bytes().startswith(start)


def test_without_matplotlib_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = "Estimate.plot draws with matplotlib, which is not installed: pip install matplotlib"
    with pytest.raises(ImportError, match=f"^{message}$"):
        estimate_of(cost()).plot()
