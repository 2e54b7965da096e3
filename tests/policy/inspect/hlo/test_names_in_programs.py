"""Makers and source lines read from single instructions of compiled programs."""

from pathlib import Path

import flax.linen
import pytest

from policy.inspect.hlo.makers import Makers
from policy.inspect.hlo.source_frames import SourceFrames
from policy.inspect.hlo.text import parse

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
    text = TABLES.format(*parents, library=flax.linen.__file__)
    frames, entry = SourceFrames(text), parse(text).entry
    assert {name: frames.source_of(i) for name, i in entry.instructions.items()} == {
        "p": "",
        "a": "model.py:12 (Net.__call__)",
        "b": "train.py:8 (step)",
        "c": "",
        "d": "old.py:3",
        "e": "",
    }


PROGRAM = Path(__file__).with_name("makers.txt").read_text()


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
        (("done", ()), "jit(f)/heavy/dot_general", "", None),
        (("a.0", ()), "jit(f)/act/tanh", "copy", None),
        (("begun", (2,)), "jit(f)/other/mul", "", None),
        (("last", ()), "", "", None),
    ],
)
def test_values_come_from_named_instructions(place, name, moving, stacked):
    maker = Makers(parse(PROGRAM)).maker_of(place)
    assert maker is not None
    assert (maker.instruction.op_name, maker.moving) == (name, moving)
    assert (maker.stacked.op_name if maker.stacked else None) == stacked


def test_elements_of_tuples_are_read_in_either_form():
    text = PROGRAM.replace("fusion(%b.3, %b.4, %b.1)", "fusion(%b.0#2, %b.4, %b.0#0)")
    text = text.replace("sine(%b.2)", "copy(%b.0#1)").replace(
        ', metadata={op_name="jit(f)/while/body/closed_call/layers/sin"}', ""
    )
    assert text.count("#") == 3
    maker = Makers(parse(text)).maker_of(("b.4", ()))
    assert maker is not None and maker.instruction.op_name == "jit(f)/act/tanh"
