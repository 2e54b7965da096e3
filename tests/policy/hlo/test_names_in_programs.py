"""Module paths, operations and source lines read from single instructions of compiled programs."""

import pytest

from policy._hlo.makers import Makers
from policy._hlo.op_names import path_and_operation
from policy._hlo.source_frames import SourceFrames
from policy._hlo.text import parse


@pytest.mark.parametrize(
    ("name", "path", "operation"),
    [
        ("jit(step)/jvp(Net)/Dense_0/dot_general", ("Net", "Dense_0"), "dot_general"),
        ("jit(step)/transpose(jvp(Net))/a/mul", ("Net", "a"), "mul"),
        (
            "jit(f)/transpose(jvp(Net))/while/body/closed_call/checkpoint/layers/out/add_any",
            ("Net", "layers", "out"),
            "add_any",
        ),
        (
            "jit(f)/transpose(jvp(Net))/while/body/eval_jaxpr/checkpoint/rematted_computation/b/mul",
            ("Net", "b"),
            "mul",
        ),
        ("jit(f)/cond/branch_1_fun/left/sin", ("left",), "sin"),
        ("jit(f)/jvp(Net)/while/body/closed_call", ("Net",), ""),
        ("jit(f)/jvp(Net)/a/jit(silu)", ("Net", "a"), ""),
        ("jit(f)/Net/a/add;jit(f)/Net/b/mul", ("Net", "a"), "add"),
        ("reduce_sum", (), "reduce_sum"),
    ],
)
def test_names_divide_into_path_and_operation(name, path, operation):
    assert path_and_operation(name) == (path, operation)


TABLES = """HloModule m
FileNames
1 "/home/user/train.py"
2 "/home/user/model.py"
3 "{library}"

FunctionNames
1 "step"
2 "make.<locals>.Net.__call__"
3 "Dense.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=8 end_line=8 column=3 end_column=49}}
2 {{file_name_id=2 function_name_id=2 line=12 end_line=12 column=3 end_column=49}}
3 {{file_name_id=3 function_name_id=3 line=99 end_line=99 column=3 end_column=49}}

StackFrames
1 {{file_location_id=1 parent_frame_id={0}}}
2 {{file_location_id=2 parent_frame_id={1}}}
3 {{file_location_id=3 parent_frame_id={2}}}
4 {{file_location_id=3 parent_frame_id={1}}}
5 {{file_location_id=3 parent_frame_id={0}}}

ENTRY %main (p: f32[]) -> f32[] {{
  %p = f32[] parameter(0), metadata={{op_name="p"}}
  %a = f32[] sine(%p), metadata={{op_name="a/sin" stack_frame_id=3}}
  %b = f32[] sine(%a), metadata={{op_name="b/sin" stack_frame_id=4}}
  %c = f32[] sine(%b), metadata={{op_name="c/sin" stack_frame_id=5}}
  %d = f32[] sine(%c), metadata={{op_name="d/sin" source_file="/home/user/old.py" source_line=3}}
  ROOT %e = f32[] sine(%d)
}}
"""


@pytest.mark.parametrize("parents", [(0, 1, 2), (1, 2, 3)], ids=["as they are", "plus one"])
def test_a_line_is_the_innermost_of_the_users(parents):
    import flax.linen

    text = TABLES.format(*parents, library=flax.linen.__file__)
    frames, entry = SourceFrames(text), parse(text)[1]
    assert {name: frames.source_of(i) for name, i in entry.instructions.items()} == {
        "p": "",
        "a": "model.py:12 (Net.__call__)",
        "b": "train.py:8 (step)",
        "c": "",
        "d": "old.py:3",
        "e": "",
    }


PROGRAM = """HloModule m
%converted (c.0: bf16[8]) -> f32[8] {
  %c.0 = bf16[8]{0} parameter(0)
  ROOT %c.1 = f32[8]{0} convert(%c.0)
}

%costly (d.0: f32[8]) -> f32[8] {
  %d.0 = f32[8]{0} parameter(0)
  %d.1 = f32[8]{0} add(%d.0, %d.0), metadata={op_name="jit(f)/other/add"}
  %d.2 = f32[] dot(%d.1, %d.0), metadata={op_name="jit(f)/heavy/dot_general"}
  ROOT %d.3 = f32[8]{0} broadcast(%d.2), dimensions={}
}

%two (t.0: f32[8]) -> (f32[8], f32[8]) {
  %t.0 = f32[8]{0} parameter(0)
  %t.1 = f32[8]{0} sine(%t.0), metadata={op_name="jit(f)/first/sin"}
  %t.2 = f32[8]{0} cosine(%t.0), metadata={op_name="jit(f)/second/cos"}
  ROOT %t.3 = (f32[8]{0}, f32[8]{0}) tuple(%t.1, %t.2)
}

%stacking (s.0: f32[4,8], s.1: f32[8], s.2: s32[]) -> f32[4,8] {
  %s.0 = f32[4,8]{1,0} parameter(0)
  %s.1 = f32[8]{0} parameter(1)
  %s.3 = f32[1,8]{1,0} bitcast(%s.1), metadata={op_name="jit(f)/while/body/jit(dynamic_update_index_in_dim)/broadcast_in_dim"}
  %s.2 = s32[] parameter(2)
  %s.4 = s32[] constant(0)
  ROOT %s.5 = f32[4,8]{1,0} dynamic-update-slice(%s.0, %s.3, %s.2, %s.4), metadata={op_name="jit(f)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"}
}

%body (b.0: (s32[], f32[8], f32[4,8])) -> (s32[], f32[8], f32[4,8]) {
  %b.0 = (s32[], f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %b.1 = s32[] get-tuple-element(%b.0), index=0
  %b.2 = f32[8]{0} get-tuple-element(%b.0), index=1
  %b.3 = f32[4,8]{1,0} get-tuple-element(%b.0), index=2
  %b.4 = f32[8]{0} sine(%b.2), metadata={op_name="jit(f)/while/body/closed_call/layers/sin"}
  %b.5 = f32[4,8]{1,0} fusion(%b.3, %b.4, %b.1), kind=kLoop, calls=%stacking, metadata={op_name="jit(f)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"}
  ROOT %b.6 = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%b.1, %b.2, %b.5)
}

ENTRY %main (w: bf16[8], x: f32[8]) -> f32[8] {
  %w = bf16[8]{0} parameter(0), metadata={op_name="w"}
  %x = f32[8]{0} parameter(1), metadata={op_name="x"}
  %of_argument = f32[8]{0} fusion(%w), kind=kLoop, calls=%converted
  %tanh = bf16[8]{0} tanh(%w), metadata={op_name="jit(f)/act/tanh"}
  %of_result = f32[8]{0} fusion(%tanh), kind=kLoop, calls=%converted
  %copied = f32[8]{0} copy(%of_result), metadata={op_name="x"}
  %costliest = f32[8]{0} fusion(%x), kind=kLoop, calls=%costly
  %both = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%two, metadata={op_name="jit(f)/first/sin"}
  %zero = s32[] constant(0)
  %zeros = f32[4,8]{1,0} broadcast(%zero), dimensions={}
  %start = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%zero, %copied, %zeros)
  %loop = (s32[], f32[8]{0}, f32[4,8]{1,0}) while(%start), condition=%body, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %last = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
}
"""


@pytest.mark.parametrize(
    ("place", "name", "moving", "stacked"),
    [
        (("of_argument", ()), "w", "convert", None),
        (("of_result", ()), "jit(f)/act/tanh", "convert", None),
        (("copied", ()), "jit(f)/act/tanh", "copy", None),
        (("costliest", ()), "jit(f)/heavy/dot_general", "", None),
        (("both", (0,)), "jit(f)/first/sin", "", None),
        (("both", (1,)), "jit(f)/second/cos", "", None),
        (("b.0", (1,)), "jit(f)/act/tanh", "copy", None),  # what the loop leaves alone
        (
            ("loop", (2,)),
            "jit(f)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
            "",
            "jit(f)/while/body/closed_call/layers/sin",
        ),
        (("last", ()), "", "", None),
    ],
)
def test_values_come_from_named_instructions(place, name, moving, stacked):
    maker = Makers(*parse(PROGRAM)).maker_of(place)
    assert maker is not None
    assert (maker.instruction.op_name, maker.moving) == (name, moving)
    assert (maker.stacked.op_name if maker.stacked else None) == stacked


def test_a_value_of_no_instruction_has_no_maker():
    assert Makers(*parse(PROGRAM)).maker_of(("nowhere", ())) is None
