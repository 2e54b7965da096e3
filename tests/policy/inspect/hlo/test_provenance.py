"""Module paths, makers and source lines of single instructions of compiled programs."""

import flax.linen
import pytest

from policy.inspect.hlo.costs import costs_of
from policy.inspect.hlo.provenance import (
    Makers,
    SourceFrames,
    by_spelled_path,
    operation_in_program,
    path_in_program,
)
from policy.inspect.hlo.text import parse
from policy.programs.paths import spelled
from tests.policy.inspect.hlo.texts import text_of

BACKWARD_SCAN = "jit(step)/transpose(jvp(Net))/layers/while/body"
REMATERIALIZED = "checkpoint/rematted_computation"


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(step)/jvp(Net)/layer_0/Dense_0/dot_general", "layer_0/Dense_0"),
        ("jit(step)/transpose(jvp(Net))/layer_0/Dense_0/dot_general", "layer_0/Dense_0"),
        ("jit(step)/jvp(Net)/act/jit(relu)/max", "act"),
        ("jit(step)/jvp(Net)/act/jit(relu)", "act"),
        ("jit(step)/Net/attention/bqhd,bkhd->bhqk/dot_general", "attention"),
        ("jit(step)/Net/convert_element_type", "Net:"),
        ("jit(step)/jvp(Net)/layers/while/body/closed_call/block/mlp/dot", "layers/block/mlp"),
        (f"{BACKWARD_SCAN}/closed_call/{REMATERIALIZED}/block/mlp/dot", "layers/block/mlp"),
        (f"{BACKWARD_SCAN}/jit(dynamic_index_in_dim)/dynamic_slice", "layers"),
        ("jit(step)/jvp(Net)/layers/while/cond/lt", "layers"),
        ("jit(step)/jvp(Net)/layers/while/body/eval_jaxpr/block/mul", "layers/block"),
        ("jit(step)/jvp(Net)/search/vmap()/while/body_pred/lt", "search"),
        ("jit(step)/jvp(Net)/router/cond/branch_1_fun/expert/dot_general", "router/expert"),
        ("jit(step)/shard_map/Net/layer/dot_general", "layer"),
        ("jit(step)/jvp(Net)/while/body/cond/body/mul", "cond/body"),
        ("jit(step)/jvp()/reduce_sum", ""),
        ("jit(step)/mul", ""),
        ("jit(step)/transpose(jvp(Net))/layers/norm/layers/norm/mul", "layers/norm"),
        ("jit(step)/Net/layers/norm/layers/norm/mul", "layers/norm/layers/norm"),
        ("params['layer']['kernel']", ""),
        ("params['encoder/layer']['kernel']", ""),
        ("x", ""),
        ("reduce_sum", ""),
        ("", ""),
        (f"jit(f)/transpose(jvp(Net))/while/body/eval_jaxpr/{REMATERIALIZED}/b/mul", "b"),
        ("jit(f)/jvp(Net)/while/body/closed_call", "Net:"),
        ("jit(f)/Net/a/add;jit(f)/Net/b/mul", "a"),
    ],
)
def test_an_operations_name_has_its_module_path(op_name, path):
    assert spelled(path_in_program(op_name)) == path


def test_names_inside_control_flow_are_relative_to_it_or_begin_with_the_model():
    relative = "jit(step)/Net/layers/while/body/closed_call/block/mul"
    whole = "jit(step)/Net/layers/while/body/closed_call/Net/layers/block/mul"
    assert path_in_program(relative) == path_in_program(whole) == ("Net", "layers", "block")


@pytest.mark.parametrize(
    ("op_name", "operation"),
    [
        ("jit(step)/jvp(Net)/Dense_0/dot_general", "dot_general"),
        ("reduce_sum", "reduce_sum"),
        ("jit(f)/jvp(Net)/while/body/closed_call", ""),
        ("jit(f)/cond/branch_1_fun", ""),
        ("jit(f)/jvp(Net)/a/jit(silu)", ""),
    ],
)
def test_an_operations_name_has_the_jax_operation(op_name, operation):
    assert operation_in_program(op_name) == operation


PROGRAM = """HloModule m
%unnamed (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="x"}
  %b = f32[4]{0} sine(%a), metadata={op_name="jit(f)/jvp(Net)/first/sin"}
  %c = f32[4]{0} cosine(%b), metadata={op_name="jit(f)/jvp(Net)/second/cos"}
  ROOT %d = f32[4]{0} copy(%c)
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %forward = f32[4]{0} sine(%x), metadata={op_name="jit(f)/jvp(Net)/first/sin"}
  %backward = f32[4]{0} cosine(%forward), \
metadata={op_name="jit(f)/transpose(jvp(Net))/first/cos"}
  %own = f32[4]{0} fusion(%backward), kind=kLoop, calls=%unnamed, \
metadata={op_name="jit(f)/jvp(Net)/third/add"}
  %loss = f32[4]{0} fusion(%own), kind=kLoop, calls=%unnamed, \
metadata={op_name="jit(f)/jvp()/add"}
  %of_last = f32[4]{0} fusion(%loss), kind=kLoop, calls=%unnamed
  ROOT %copy = f32[4]{0} copy(%of_last)
}
"""


def test_times_are_by_module_forward_and_backward_together():
    costs = costs_of(PROGRAM, lambda flops, moved: moved)
    each = 2 * 4 * 4
    expected = {"first": 2 * each, "": 2 * each, "third": each, "second": each}
    assert by_spelled_path(costs.by_path) == expected
    assert sum(costs.by_path.values()) == costs.time == 6 * each


def test_programs_of_several_models_name_them():
    paths = {("Actor", "head"): 1.0, ("Critic", "head"): 2.0, (): 4.0}
    assert by_spelled_path(paths) == {"": 4.0, "Critic:head": 2.0, "Actor:head": 1.0}
    assert list(by_spelled_path(paths)) == ["", "Critic:head", "Actor:head"]


@pytest.mark.slow
def test_a_path_that_lost_its_beginning_counts_for_the_whole_one():
    text = PROGRAM.replace("jit(f)/jvp(Net)/third/add", "jit(f)/first/add")
    costs = costs_of(text, lambda flops, moved: 1.0)
    assert costs.by_path == {("Net", "first"): 3.0, ("Net", "second"): 1.0, (): 2.0}


@pytest.mark.parametrize("parents", [(0, 1, 2), (1, 2, 3)], ids=["as they are", "plus one"])
def test_a_line_is_the_innermost_of_the_users(parents):
    text = text_of("stack_frames").replace("LIBRARY", flax.linen.__file__)
    for name, number in zip(("ROOT_FRAME", "OUTER_FRAME", "INNER_FRAME"), parents, strict=True):
        text = text.replace(name, str(number))
    frames, entry = SourceFrames(text), parse(text).entry
    assert {name: frames.source_of(i) for name, i in entry.instructions.items()} == {
        "p": "",
        "a": "model.py:12 (Net.__call__)",
        "b": "train.py:8 (step)",
        "c": "",
        "d": "old.py:3",
        "e": "",
    }


@pytest.mark.parametrize(
    ("place", "name", "moving", "stacked"),
    [
        (("of_argument", ()), "w", "convert", None),
        (("of_result", ()), "jit(f)/act/tanh", "convert", None),
        (("copied", ()), "jit(f)/act/tanh", "copy", None),
        (("costliest", ()), "jit(f)/heavy/dot_general", "broadcast", None),
        (("both", (0,)), "jit(f)/first/sin", "", None),
        (("both", (1,)), "jit(f)/second/cos", "", None),
        (("b.0", (1,)), "jit(f)/act/tanh", "copy", None),  # what the loop leaves alone
        (
            ("loop", (2,)),
            "jit(f)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
            "",
            "jit(f)/while/body/closed_call/layers/sin",
        ),
        (("done", ()), "jit(f)/heavy/dot_general", "broadcast", None),
        (("a.0", ()), "jit(f)/act/tanh", "copy", None),
        (("begun", (2,)), "jit(f)/other/mul", "", None),
        (("last", ()), "", "", None),
    ],
)
def test_values_come_from_named_instructions(place, name, moving, stacked):
    maker = Makers(parse(text_of("makers"))).maker_of(place)
    assert maker is not None
    assert (maker.instruction.op_name, maker.moving) == (name, moving)
    assert (maker.stacked.op_name if maker.stacked else None) == stacked


def test_elements_of_tuples_are_read_in_either_form():
    text = text_of("makers").replace("fusion(%b.3, %b.4, %b.1)", "fusion(%b.0#2, %b.4, %b.0#0)")
    text = text.replace("sine(%b.2)", "copy(%b.0#1)").replace(
        ', metadata={op_name="jit(f)/while/body/closed_call/layers/sin"}', ""
    )
    assert text.count("#") == 3
    maker = Makers(parse(text)).maker_of(("b.4", ()))
    assert maker is not None and maker.instruction.op_name == "jit(f)/act/tanh"
