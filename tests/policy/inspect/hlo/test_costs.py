"""Exchanges, and kernels of unknown cost, in programs' texts."""

from policy.inspect.hlo.costs import costs_of

EXCHANGES = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%body (s: f32[64]) -> f32[64] {
  %s = f32[64]{0} parameter(0)
  %reduced = (f32[64]{0}, bf16[8]{0}) all-reduce-start(%s, %s), channel_id=1, to_apply=%add
  %both = (f32[64]{0}, bf16[8]{0}) all-reduce-done(%reduced)
  ROOT %next = f32[64]{0} get-tuple-element(%both), index=0
}
%condition (s: f32[64]) -> pred[] {
  %s.1 = f32[64]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}
ENTRY %main (x: bf16[8]) -> bf16[64] {
  %x = bf16[8]{0} parameter(0)
  %start = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%x), channel_id=2, dimensions={0}
  %gathered = bf16[64]{0} all-gather-done(%start)
  %again = bf16[64]{0} all-gather(%x), channel_id=3, dimensions={0}
  %wide = f32[64]{0} convert(%gathered)
  %loop = f32[64]{0} while(%wide), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %scattered = f32[8]{0} reduce-scatter(%loop), channel_id=4, dimensions={0}, to_apply=%add
}
"""


def test_exchanges_are_counted_with_their_bytes_in_loops_as_often_as_those_run():
    costs = costs_of(EXCHANGES)
    assert costs.exchanges == {
        ("all-gather", "bf16"): 2,
        ("all-reduce", "f32"): 5,
        ("all-reduce", "bf16"): 5,
        ("reduce-scatter", "f32"): 1,
    }
    assert costs.collectives == {
        ("all-gather", "bf16"): 2 * 64 * 2,
        ("all-reduce", "f32"): 5 * 64 * 4,
        ("all-reduce", "bf16"): 5 * 8 * 2,
        ("reduce-scatter", "f32"): 64 * 4,
    }


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
    assert costs.uncounted == [
        "cycles of __cub$DeviceRadixSort ()",
        "cycles of triton (jit(f)/own)",
    ]


RAGGED = """HloModule m
ENTRY %main (x: bf16[256,64], w: bf16[4,64,32], g: s32[4]) -> bf16[256,32] {
  %x = bf16[256,64]{1,0} parameter(0)
  %w = bf16[4,64,32]{2,1,0} parameter(1)
  %g = s32[4]{0} parameter(2)
  ROOT %ragged-dot-none = bf16[256,32]{1,0} custom-call(%g, %x, %w), \
custom_call_target="tpu_custom_call"
}
"""


def test_a_tpus_ragged_matmul_multiplies_each_row_by_one_group():
    assert costs_of(RAGGED).flops == {"bfloat16": 2 * 256 * 64 * 32}
