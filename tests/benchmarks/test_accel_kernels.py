"""Pallas kernels in compiled programs, as `benchmarks.accel` counts them."""

import pytest

from policy.inspect.hlo import costs as hlo
from policy.inspect.hlo.text import parse

# As the compiler prints it, the kernel's body and layouts left out: its metadata has line breaks.
PROGRAM = """HloModule jit_step, entry_computation_layout={()->f32[]}

ENTRY %main.1 (q.1: bf16[2,4,512,64], k.1: bf16[2,4,64,256]) -> bf16[2,4,512,64] {
  %q.1 = bf16[2,4,512,64]{3,2,1,0} parameter(0)
  %k.1 = bf16[2,4,64,256]{3,2,1,0} parameter(1)
  %mask.1 = s8[1,1,1]{2,1,0} constant({ { {0} } })
  %splash_mha_fwd_residuals.1 = (bf16[2,4,512,64]{3,2,1,0}, f32[2,4,512,128]{3,2,1,0}) custom-call(%mask.1, %q.1, %k.1, %k.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(step)/splash_mha_fwd_residuals"}, backend_config={"custom_call_config":{"body":"TUzv"}}
  %out.1 = bf16[2,4,512,64]{3,2,1,0} get-tuple-element(%splash_mha_fwd_residuals.1), index=0, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}
  ROOT %last.1 = bf16[2,4,512,64]{3,2,1,0} fusion(%out.1), kind=kLoop, backend_config={"estimated_cycles":"7"}
}
"""  # noqa: E501


def costs(text, per_flop=1.0):
    # The fusion's computation is left out of the text, and so is its traffic.
    text = text.replace(" fusion(%out.1), kind=kLoop", " copy(%out.1)")
    return hlo.costs_of(text, lambda flops, moved: sum(flops.values()) * per_flop)


def test_an_instruction_with_line_breaks_is_read_whole_and_so_is_what_follows_it():
    entry = parse(PROGRAM).entry
    assert list(entry.instructions)[-3:] == ["splash_mha_fwd_residuals.1", "out.1", "last.1"]
    assert (
        entry.instructions["splash_mha_fwd_residuals.1"].op_name
        == "jit(step)/splash_mha_fwd_residuals"
    )


def test_a_kernels_flops_follow_from_its_shapes_and_are_named_a_roofline():
    found = costs(PROGRAM)
    flops = 2 * 2 * (2 * 4 * 512 * 64) * 256  # two matmuls of all queries with all keys
    assert found.time == flops + 7 and not found.uncounted
    assert found.rooflines == {"splash_mha_fwd_residuals": flops}


@pytest.mark.parametrize(
    ("name", "results", "matmuls"),
    [
        ("splash_mha_dq_no_residuals", "bf16[2,4,512,64]{3,2,1,0}", 3),
        (
            "splash_mha_dkv_no_residuals",
            "(bf16[2,4,256,64]{3,2,1,0}, bf16[2,4,256,64]{3,2,1,0})",
            4,
        ),
        (
            "splash_mqa_dkv",
            "(bf16[2,1,4,512,64]{4,3,2,1,0}, bf16[2,256,64]{2,1,0}, bf16[2,256,64]{2,1,0})",
            5,
        ),
    ],
)
def test_backward_has_a_matmul_more_for_each_gradient(name, results, matmuls):
    old = "(bf16[2,4,512,64]{3,2,1,0}, f32[2,4,512,128]{3,2,1,0}) custom-call"
    text = PROGRAM.replace(old, f"{results} custom-call").replace("splash_mha_fwd_residuals", name)
    assert costs(text).time == matmuls * 2 * (2 * 4 * 512 * 64) * 256 + 7


def test_an_authors_estimate_comes_first_and_an_unknown_kernel_is_uncounted():
    other = PROGRAM.replace("splash_mha_fwd_residuals", "scatter")
    assert costs(other).uncounted == ["FLOPs of tpu_custom_call (jit(step)/scatter)"]
    estimated = other.replace(
        '"body":"TUzv"', '"body":"TUzv","cost_estimate":{"flops":"12","bytes_accessed":"3"}'
    )
    assert costs(estimated).time == 19
