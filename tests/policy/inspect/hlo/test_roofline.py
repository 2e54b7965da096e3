"""Times by published figures."""

import dataclasses
from typing import Any

import pytest

from policy.inspect.estimate.chips import CHIPS, Chip
from policy.inspect.estimate.roofline import compute_seconds, exchange_seconds, kernel_time
from policy.inspect.hlo.costs import Costs, costs_of

H100, V5E = CHIPS["h100"], CHIPS["v5e"]
SECONDS: Any = kernel_time(H100)
UNPUBLISHED = Chip("cpu", 0.0, 0.0, {}, 0.0, 0.0, "")


def test_a_kernel_takes_the_longer_of_computing_and_moving():
    assert SECONDS({"bfloat16": 989.5e12}, 0.0) == 1.0
    assert SECONDS({"bfloat16": 989.5e12}, 2 * 3350e9) == 2.0
    assert SECONDS({}, 3350e9) == 1.0


@pytest.mark.parametrize(
    ("key", "flops"),
    [
        ("float8_e4m3fn", 1979e12),
        ("bfloat16", 989.5e12),
        ("float32", 494.75e12),
        ("float32, highest", 67e12),
        ("float32, bfloat16 x3", 989.5e12 / 3),
        ("float32, tf32 x3", 494.75e12 / 3),
        ("float64", 67e12),
    ],
)
def test_each_dtype_and_precision_has_its_own_peak(key, flops):
    assert SECONDS({key: flops}, 0.0) == pytest.approx(1.0)


def test_matmuls_of_two_dtypes_run_one_after_the_other():
    assert SECONDS({"bfloat16": 989.5e12, "float32": 494.75e12}, 0.0) == 2.0


@pytest.mark.parametrize(
    ("name", "flops"), [("a100", 19.5e12), ("h100", 67e12), ("h200", 67e12), ("b200", 75e12)]
)
def test_a_gpus_highest_precision_has_the_published_peak_without_tensor_cores(name, flops):
    assert CHIPS[name].peak("float32, highest") == flops < CHIPS[name].peak("float32")


def test_a_tpu_takes_three_and_six_passes_for_float32():
    passes = {"float32": 1, "float32, high": 3, "float32, highest": 6}
    for name in ("v5e", "v6e", "tpu7x"):
        chip = CHIPS[name]
        assert {key: chip.peak("bfloat16") / chip.peak(key) for key in passes} == passes


def test_an_unlisted_precision_has_the_peak_of_its_dtype():
    assert CHIPS["h100"].peak("float32, high") == CHIPS["h100"].peak("float32")
    assert V5E.peak("int8, highest") == V5E.peak("int8") != V5E.peak("float32")
    assert UNPUBLISHED.peak("float32") == 0.0


@pytest.mark.parametrize(
    "chip",
    [UNPUBLISHED, dataclasses.replace(H100, peaks={}), dataclasses.replace(H100, bandwidth=0.0)],
)
def test_without_published_figures_no_time_is_known(chip):
    assert kernel_time(chip) is None
    assert compute_seconds(chip, Costs(5.0)) is None


TWO = """HloModule m
ENTRY %main (x: f32[512,512]) -> f32[512,512] {
  %x = f32[512,512]{1,0} parameter(0)
  %dot.1 = f32[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
operand_precision={highest,highest}
  ROOT %sine = f32[512,512]{1,0} sine(%dot.1)
}
"""


def test_a_gpus_program_takes_the_sum_of_its_kernels_seconds():
    costs = costs_of(TWO, kernel_time(H100))
    computing, moving = 2 * 512**3 / 67e12, 2 * 512 * 512 * 4 / 3350e9
    assert computing > 1.5 * moving  # more than the three arrays of the dot take
    assert compute_seconds(H100, costs) == pytest.approx(computing + moving)


def test_a_tpus_kernels_without_an_estimate_take_the_rooflines_cycles():
    text = TWO.replace("sine(%dot.1)", 'sine(%dot.1), backend_config={"estimated_cycles":"100"}')
    costs = costs_of(text, kernel_time(V5E))
    (roof,) = costs.rooflines.values()
    assert roof == pytest.approx(6 * 2 * 512**3 / 197e12 * 1.5e9)  # six passes
    assert costs.time == 100 + roof
    assert compute_seconds(V5E, costs) == pytest.approx(costs.time / 1.5e9)


@pytest.mark.parametrize(
    ("target", "uncounted"), [("ZeroCrop", []), ("mosaic", ["FLOPs of mosaic ()"])]
)
def test_a_custom_call_counts_unless_it_may_multiply(target, uncounted):
    call = f'custom-call(%dot.1), custom_call_target="{target}"'
    text = TWO.replace("sine(%dot.1)", f'{call}, backend_config={{"estimated_cycles":"1"}}')
    assert not costs_of(text, kernel_time(V5E)).uncounted
    costs = costs_of(TWO.replace("sine(%dot.1)", call), kernel_time(V5E))
    assert costs.uncounted == uncounted and costs.time > 0


def test_an_all_reduce_sends_its_result_twice_and_the_others_once():
    sent = {("all-reduce", "bf16"): 100e9, ("all-gather", "f32"): 50e9}
    assert exchange_seconds(V5E, sent) == 250e9 / 200e9
    assert exchange_seconds(UNPUBLISHED, sent) is None
    assert exchange_seconds(UNPUBLISHED, {}) == 0.0
