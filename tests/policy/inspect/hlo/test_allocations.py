"""Memory read from texts of XLA: those of a program that is too large for a TPU v5e
(v5e_out_of_memory), and single lines of other compilers' texts.
"""

from pathlib import Path

import pytest

from policy.inspect.hlo.allocations import allocations_of, largest_moment, last_of, live_ranges_of
from policy.inspect.hlo.buffers import memory_of
from policy.inspect.hlo.dump import Dump, read_dump
from policy.programs.paths import spelled

FOLDER = Path(__file__).with_name("v5e_out_of_memory")
GIB = 2**30

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {7}, maybe-live-out:
 value: <1 tuple.1{7} @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 16, output shape is |(f32[16], f32[4])|, maybe-live-out:
 value: <2 tuple{} @0> (size=16,offset=0): (f32[16]{0}, f32[4]{0})
allocation 2: size 512, maybe-live-out:
 value: <3 early @0> (size=32,offset=0): s8[32]{0}
 value: <4 late @0> (size=16,offset=0): f32[4]{0}
 value: <12 scratch @0> (size=64,offset=64): f32[16]{0}
allocation 3: size 8, thread-local:
 value: <5 add @0> (size=4,offset=0): f32[]
allocation 4: size 12, constant:
 value: <6 constant.2..sunk.1 @0> (size=12,offset=0): f32[3]{0}
allocation 5: size 4096, color 1, preallocated-temp:
 value: <7 on-chip @1> (size=4096,offset=0): f32[1024]{0:T(1024)S(1)}
allocation 6: size 100, preallocated-temp:
 value: <8 operand @0> (size=60,offset=0): f32[15]{0}
 value: <9 in-place @0> (size=60,offset=0): f32[15]{0}
 value: <10 while.1{2} (phi) @0> (size=24,offset=64): bf16[12]{0}
 value: <11 alone @0> (size=80,offset=0): f32[20]{0}
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:tuple.1
  BufferLiveRange:
    early{}:0-2
    late{}:3-9
    scratch{}:5-6
    tuple{}:8-9
    operand{}:1-4
    in-place{}:4-6
    while.1{2}:3-5
    alone{}:7-8
"""


def test_allocations_are_told_apart_by_what_they_hold():
    found = allocations_of(ASSIGNMENT)
    assert [(a.kind, a.bytes, a.color, a.parameter) for a in found] == [
        ("argument", 64, 0, 7),  # of a tuple: its number in it
        ("output", 16, 0, None),
        ("output", 512, 0, None),
        ("thread-local", 8, 0, None),
        ("constant", 12, 0, None),
        ("temporary", 4096, 1, None),
        ("temporary", 100, 0, None),
    ]
    assert found[1].values[0].array is None
    assert found[4].values[0].place == ("constant.2..sunk.1", ())
    assert found[6].values[2].place == ("while.1", (2,))


def test_of_values_that_share_memory_the_later_one_is_alive_at_the_largest_moment():
    temporaries = allocations_of(ASSIGNMENT)[6:]
    alive = largest_moment(temporaries, live_ranges_of(RANGES))
    # `alone` takes 80 bytes, the other two 84; `operand` and `in-place` are at one place.
    assert [value.place[0] for value in alive] == ["operand", "while.1"]
    overwritten = RANGES.replace("while.1{2}:3-5", "while.1{2}:4-5")
    alive = largest_moment(temporaries, live_ranges_of(overwritten))
    assert [value.place[0] for value in alive] == ["in-place", "while.1"]


def test_an_output_is_the_value_that_lives_the_longest():
    value = last_of(allocations_of(ASSIGNMENT)[2], live_ranges_of(RANGES))
    assert value is not None and value.place[0] == "late"


def test_a_text_that_assigns_no_memory_is_refused():
    with pytest.raises(ValueError, match="assigns no memory: it begins with 'nothing'"):
        allocations_of("nothing")


def test_a_program_that_runs_out_of_memory_takes_what_its_error_says():
    memory = memory_of(read_dump(FOLDER))
    assert f"{memory.total / GIB:.2f}" == "26.56"  # "... for HLO temporaries (26.56G) exceeds ..."
    assert memory.arguments == 20480 * 20480 * 2 + 163840 * 20480 * 2
    assert memory.outputs == 163840 * 20480 * 2 + 512  # and a table of addresses
    assert memory.temporaries == 2 * 163840 * 20480 * 2 + 20480 * 20480 * 2


def test_its_largest_buffers_have_their_modules_operations_and_lines():
    buffers = memory_of(read_dump(FOLDER)).buffers
    large, small = (163840, 20480), (20480, 20480)
    assert [
        (b.kind, b.shape, b.dtype, spelled(b.path), b.operation, b.source, b.parameter, b.label)
        for b in buffers
    ] == [
        ("argument", large, "bfloat16", "", "", "", 1, "x"),
        ("output", large, "bfloat16", "", "add", "train.py:27 (step)", None, ""),
        ("temporary", large, "bfloat16", "blk2", "dot_general", "train.py:25 (f)", None, ""),
        ("temporary", large, "bfloat16", "blk1", "dot_general", "train.py:25 (f)", None, ""),
        ("argument", small, "bfloat16", "", "", "", 0, "w"),
        ("temporary", small, "bfloat16", "blk2", "dot_general", "train.py:25 (f)", None, ""),
    ]
    assert [b.bytes for b in buffers] == [163840 * 20480 * 2] * 4 + [20480 * 20480 * 2] * 2


def test_a_copy_of_an_argument_names_it():
    program = FOLDER.with_name("makers.txt").read_text()
    values = """allocation 0: size 64, preallocated-temp:
 value: <1 of_argument @0> (size=32,offset=0): f32[8]{0}
 value: <2 of_result @0> (size=32,offset=32): f32[8]{0}
"""
    dump = Dump(program, values, "  of_argument{}:0-1\n  of_result{}:0-1\n")
    assert [
        (b.kind, b.path, b.operation, b.parameter, b.label) for b in memory_of(dump).buffers
    ] == [
        ("temporary", (), "convert", 0, "w"),
        ("temporary", ("act",), "convert", None, ""),
    ]


def test_a_folder_without_one_program_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"should hold the files of one compiled .* but has none"):
        read_dump(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.after_optimizations.txt").write_text("")
    with pytest.raises(ValueError, match=r"has a\.after_optimizations\.txt, b\.after"):
        read_dump(tmp_path)
    (tmp_path / "b.after_optimizations.txt").unlink()
    with pytest.raises(ValueError, match=r"no a.after_optimizations-buffer-assignment.txt: the"):
        read_dump(tmp_path)
