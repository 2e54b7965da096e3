"""Costs read from texts of programs that XLA compiled for a TPU v5e and an H100
(tests/benchmarks/hlo).
"""

import re
from pathlib import Path

import pytest

from policy.inspect.estimate.chips import CHIPS
from policy.inspect.estimate.roofline import exchange_seconds
from policy.inspect.hlo import costs as hlo
from policy.inspect.hlo import traffic
from policy.inspect.hlo.text import parse
from policy.inspect.hlo.trip_counts import turns

FOLDER = Path(__file__).with_name("hlo")


def text(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def loops(hlo_text: str) -> list[int | None]:
    every = parse(hlo_text).instructions.values()
    return [turns(i) for i in every if i.opcode == "while"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("v5e_scan_grad", [7, 7]),
        ("v5e_scan_nested", [5, 7]),
        ("v5e_scan_reversed", [7]),
        ("v5e_while_unknown", [None]),
        ("h100_scan_grad", [7, 7]),
        ("h100_scan_reversed", [7]),
    ],
)
def test_a_loop_runs_as_often_as_its_program_says(name, counts):
    assert loops(text(name)) == counts


@pytest.mark.parametrize("name", ["h100_scan_grad", "h100_scan_reversed"])
def test_a_count_is_read_where_the_compiler_does_not_state_it(name):
    stated = text(name)
    assert "known_trip_count" in stated
    assert loops(stated.replace("known_trip_count", "nothing")) == loops(stated)


def test_a_bodys_cycles_count_as_often_as_it_runs():
    assert hlo.costs_of(text("v5e_scan_grad")).time == 7 * (2573 + 1957) + 7 * 2102
    inner, outer = hlo.costs_of(text("v5e_scan_nested")), 35 * 1957
    assert inner.time == outer and inner.kernels == 35


def test_a_loop_whose_count_depends_on_data_is_named():
    costs = hlo.costs_of(text("v5e_while_unknown"))
    assert costs.uncounted == ["the trip count of while.5 ()"]


def test_of_a_conditional_the_costlier_branch_counts():
    costs = hlo.costs_of(text("v5e_cond"))
    assert (
        costs.time == 1833 + 4588
    )  # the slice of the predicate, and the two matmuls, not the sine's 1957


def test_a_slice_and_an_update_in_place_move_what_they_slice_and_update():
    array, whole = 128 * 128 * 4, 7 * 128 * 128 * 4
    costs = hlo.costs_of(text("h100_scan_reversed"))
    before = (
        (2 * array) + (array + whole) + whole
    )  # a copy of the input, a broadcast of it, and zeros
    a_turn = (array + array) + (2 * array + array)  # reads and updates; reads, slices and adds
    scalars = costs.bytes - before - 7 * a_turn
    assert 0 < scalars < 7 * 64


def test_what_starts_something_moves_it_once():
    array = 128 * 128 * 4
    every = parse(text("v5e_scan_grad")).entry.instructions.values()
    starts = [i for i in every if i.opcode == "copy-start"]
    assert [traffic.moved(i) for i in starts] == [array, array]  # from memory; to memory
    assert [len(traffic.produced(i)) for i in starts] == [1, 1]


ASYNCHRONOUS = """HloModule m
%sliced (p.0: f32[7,128], i.0: s32[]) -> f32[1,128] {
  %p.0 = f32[7,128]{1,0} parameter(0)
  %i.0 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,128]{1,0} dynamic-slice(%p.0, %i.0, %zero), dynamic_slice_sizes={1,128}
}
ENTRY %main (a: f32[7,128], b: s32[]) -> f32[4,128] {
  %a = f32[7,128]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %start = ((f32[7,128]{1,0}, s32[]), f32[1,128]{1,0}, u32[]) fusion-start(%a, %b), \
kind=kLoop, calls=%sliced
  %done = f32[1,128]{1,0} fusion-done(%start)
  %gather = (f32[1,128]{1,0}, f32[4,128]{1,0}) all-gather-start(%done), channel_id=1, dimensions={0}
  %gathered = f32[4,128]{1,0} all-gather-done(%gather)
  %scatter = ((f32[4,128]{1,0}), f32[1,128]{1,0}) reduce-scatter-start(%gathered), \
channel_id=2, dimensions={0}
  ROOT %scattered = f32[1,128]{1,0} reduce-scatter-done(%scatter)
}
"""


def test_an_asynchronous_slice_is_one_kernel_and_its_end_none():
    costs = hlo.costs_of(ASYNCHRONOUS)
    assert (costs.kernels, costs.bytes) == (0, 128 * 4 + 4 + 128 * 4)


def test_collectives_are_what_is_sent_once_from_start_to_end():
    costs = hlo.costs_of(ASYNCHRONOUS)
    assert costs.collectives == {
        ("all-gather", "f32"): 4 * 128 * 4,
        ("reduce-scatter", "f32"): 4 * 128 * 4,
    }


def test_a_collective_that_runs_beside_kernels_counts_once():
    weights = 3 * 2048 * 2048 * 2
    costs = hlo.costs_of(text("v5e_collectives"))
    assert costs.collectives == {("all-gather", "bf16"): weights, ("all-reduce", "bf16"): weights}
    chip = CHIPS["v5e"]
    assert exchange_seconds(chip, costs.collectives) == 3 * weights / chip.link_bandwidth


def test_a_kernel_of_the_users_own_is_at_the_roofline_by_its_estimate():
    moved = 2 * 1024 * 512 * 4
    costs = hlo.costs_of(text("v5e_pallas"), lambda flops, moved: sum(flops.values()) / 1e6 + moved)
    assert costs.rooflines == {"tpu_custom_call": 1e9 / 1e6 + moved}
    assert costs.time == 15249 + costs.rooflines["tpu_custom_call"] and not costs.uncounted


def test_a_kernel_without_an_estimate_is_not_free():
    costs = hlo.costs_of(text("v5e_pallas_without_estimate"), lambda flops, moved: 0.0)
    assert costs.uncounted == ["FLOPs of tpu_custom_call ()"]


def test_without_loops_the_cycles_are_the_sum_of_the_estimates():
    for name in ("v5e_collectives", "v5e_pallas_without_estimate"):
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', text(name))
        assert hlo.costs_of(text(name)).time == sum(map(int, estimates))


def test_a_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="not an HLO module: it has no ENTRY"):
        parse("HloModule nothing\n")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bf16", 2), ("f8e4m3fn", 1), ("s4", 0.5), ("pred", 1), ("u32", 4), ("c64", 8), ("token", 0)],
)
def test_an_arrays_bytes_are_its_dtypes(dtype, size):
    module = (
        f"HloModule m\nENTRY %main (p: {dtype}[6]) -> {dtype}[6] {{\n"
        f"  ROOT %p = {dtype}[6]{{0}} parameter(0)\n}}\n"
    )
    assert parse(module).entry.root.results[0].bytes == 6 * size
