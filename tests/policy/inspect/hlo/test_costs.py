"""Cycles, trip counts, exchanges, and kernels of unknown cost, in programs' texts."""

import re

import pytest

from policy.inspect.hlo.costs import costs_of, turns
from policy.inspect.hlo.text import parse
from tests.policy.inspect.hlo.texts import text_of


def test_a_text_that_is_no_module_is_rejected():
    with pytest.raises(ValueError, match="not an HLO module: it has no ENTRY"):
        parse("HloModule nothing\n")


def loops(text: str) -> list[int | None]:
    return [turns(i) for i in parse(text).instructions.values() if i.opcode == "while"]


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
def test_a_loop_runs_as_often_as_its_program_says_whether_or_not_that_is_stated(name, counts):
    text = text_of(name)
    assert ("known_trip_count" in text) == name.startswith("h100")
    assert loops(text) == loops(text.replace("known_trip_count", "nothing")) == counts


@pytest.mark.parametrize(
    ("name", "cycles"),
    [
        ("v5e_scan_grad", 7 * (2573 + 1957) + 7 * 2102),
        ("v5e_scan_nested", 35 * 1957),
        ("v5e_cond", 1833 + 4588),  # the slice of the predicate, and two matmuls, not the sine
    ],
)
def test_bodies_count_as_often_as_they_run_and_of_branches_the_costlier_one(name, cycles):
    assert costs_of(text_of(name)).time == cycles


def test_a_loop_whose_count_depends_on_data_is_named():
    costs = costs_of(text_of("v5e_while_unknown"))
    assert costs.uncounted == ["the trip count of while.5 ()"]


def test_without_loops_the_cycles_are_the_sum_of_the_estimates():
    for name in ("v5e_collectives", "v5e_pallas_without_estimate"):
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', text_of(name))
        assert costs_of(text_of(name)).time == sum(map(int, estimates))


def test_exchanges_are_counted_with_their_bytes_in_loops_as_often_as_those_run():
    weights = 3 * 2048 * 2048 * 2
    beside_kernels = {("all-gather", "bf16"): weights, ("all-reduce", "bf16"): weights}
    assert costs_of(text_of("v5e_collectives")).collectives == beside_kernels
    assert costs_of(text_of("exchanges")).collectives == {
        ("all-gather", "bf16"): 2 * 64 * 2,
        ("all-reduce", "f32"): 5 * 64 * 4,
        ("all-reduce", "bf16"): 5 * 8 * 2,
        ("reduce-scatter", "f32"): 64 * 4,
    }


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


def test_what_is_asynchronous_counts_once_from_its_start_to_its_end():
    costs = costs_of(ASYNCHRONOUS)
    assert (costs.kernels, costs.bytes) == (0, 128 * 4 + 4 + 128 * 4)  # of the slice
    sent = dict.fromkeys((("all-gather", "f32"), ("reduce-scatter", "f32")), 4 * 128 * 4)
    assert costs.collectives == sent


SCATTERED = """
%all-reduce-scatter.1 (x: bf16[64,8]) -> bf16[16,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %all-reduce.1 = bf16[64,8]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = bf16[16,8]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), \
dynamic_slice_sizes={16,8}
}

ENTRY %main (y: bf16[64,8]) -> bf16[16,8] {
  %y = bf16[64,8]{1,0} parameter(0)
  ROOT %scatter = bf16[16,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_sum_that_is_fused_with_the_slice_kept_of_it_counts_as_a_reduce_scatter_of_its_operand():
    assert costs_of(SCATTERED).collectives == {("reduce-scatter", "bf16"): 64 * 8 * 2}


# As the processor's compiler writes them: calls that run in threads, and fusions of libraries.
PROCESSOR = """HloModule m
%parallel (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %fusion.1 = f32[8,8]{1,0} sine(%p), metadata={op_name="jit(f)/Net/sin"}
}
%library (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %call = f32[8,8]{1,0} call(%x), to_apply=%parallel, \
backend_config={"outer_dimension_partitions":["2"]}
  %ynn_fusion = f32[8,8]{1,0} fusion(%call, %x), kind=kCustom, calls=%library, \
backend_config={"fusion_config":{"kind":"__ynn_fusion"}}
  ROOT %onednn = f32[8,8]{1,0} custom-call(%ynn_fusion, %x), \
custom_call_target="__onednn$matmul", backend_config={}
}
"""


def test_a_processors_program_has_no_time_and_nothing_that_is_uncounted():
    costs = costs_of(PROCESSOR)
    assert (costs.time, costs.uncounted, costs.rooflines) == (0.0, [], {})
    assert costs.kernels == 3 and costs.bytes == (2 + 3 + 3) * 8 * 8 * 4


OPAQUE = """HloModule m
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %sine = f32[64]{0} sine(%x), metadata={op_name="jit(f)/sin"}
  %sorted = (f32[64]{0}, u8[16]{0}) custom-call(%sine), \
custom_call_target="__cub$DeviceRadixSort"
  %keys = f32[64]{0} get-tuple-element(%sorted), index=0
  ROOT %own = f32[64]{0} custom-call(%keys), custom_call_target="triton", \
metadata={op_name="jit(f)/own"}
}
"""


def test_an_opaque_kernel_takes_the_time_of_its_bytes_and_is_named_but_a_sort_is_not():
    costs = costs_of(OPAQUE, lambda flops, moved: moved)
    assert costs.uncounted == ["FLOPs of triton (jit(f)/own)"]
    assert costs.time == costs.bytes == 2 * 256 + (2 * 256 + 16) + 2 * 256
    assert costs.rooflines == {}  # all of it is


def test_kernels_without_cycles_are_named_where_others_have_them():
    config = ', backend_config={"estimated_cycles":"9"}'
    text = OPAQUE.replace('op_name="jit(f)/sin"}', f'op_name="jit(f)/sin"}}{config}')
    costs = costs_of(text)
    assert costs.time == 9
    kernels = ("__cub$DeviceRadixSort ()", "triton (jit(f)/own)")
    assert costs.uncounted == [f"cycles of {kernel}" for kernel in kernels]


def test_the_largest_number_of_cycles_is_none_of_the_compilers_estimates():
    estimate = ', backend_config={"estimated_cycles":"9223372036854775807"}'
    text = OPAQUE.replace('op_name="jit(f)/sin"}', f'op_name="jit(f)/sin"}}{estimate}')
    assert costs_of(text, lambda flops, moved: 7.0).time == 3 * 7.0
    costs = costs_of(text_of("v5e_pallas_without_estimate"), lambda flops, moved: 0.0)
    assert costs.uncounted == ["FLOPs of tpu_custom_call ()"]
