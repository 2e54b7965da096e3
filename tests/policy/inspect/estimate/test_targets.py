"""Targets by name, GPUs of one's own figures, and times by published figures.

Nothing is compiled.
"""

import dataclasses
import json
import os
from typing import Any

import jax
import pytest

from policy.inspect.estimate import targets
from policy.inspect.estimate.targets import CHIPS, Chip, Target, compute_seconds, kernel_time
from policy.inspect.hlo.costs import Costs, costs_of


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", r"There is no target 'v9:2x2'\. Chips: v2, v3, v4, v5e"),
        ("h10", r"There is no target 'h10'\. Did you mean 'h100'\?"),
        ("tpu", r"There is no target 'tpu'\. Name the chip: 'v5e:2x2', or 'here'"),
        ("gpu", r"There is no target 'gpu'\. Name the chip: 'h100', or 'here'"),
        ("v5e-16", r"colon: v5e-16 has 16 chips, as in 'v5e:4x4'"),
        ("v4-16", r"colon: v4-16 has 8 chips, as in 'v4:2x2x2'"),
        ("v6e-2", r"colon: v6e-2 has 2 chips, as in 'v6e:1x2'"),
        ("h100-8", r"Did you mean 'h100:8'\?"),
        ("v5e:4", r"'v5e:4' should have 2 axes of chips, as in v5e:4x4; v5e alone is one chip"),
        ("v5p:4x4", "'v5p:4x4' should have 3 axes of chips, as in v5p:4x4x4"),
        ("v5e:32x32", "has 1024 chips, but the largest topology of v5e has 256"),
        ("h100:x", "'h100:x' should end in a number of devices, as in h100:8"),
        ("cpu:8", r"'cpu:8' should be 'cpu' alone: .* XLA_FLAGS=--xla_force_host"),
    ],
)
def test_a_target_that_there_is_not_is_rejected(name, message):
    with pytest.raises(ValueError, match=message):
        Target(name)


def test_every_chip_is_a_target_with_figures_and_a_tpus_clock_follows_from_its_peak():
    for name, chip in CHIPS.items():
        target = Target(name)
        assert target.kind == name and target.chip is chip and target.platform in ("tpu", "cuda")
        assert chip.memory > 7e9 and chip.bandwidth > 1e11 and chip.link_bandwidth > 1e11
        assert chip.peak("bfloat16") > 1e13 and (chip.clock > 0) == (chip.platform == "tpu")
        assert bool(chip.device) == (chip.platform == "cuda") != bool(chip.axes)
        if chip.device:
            assert abs(chip.device["memory_bandwidth"] / chip.bandwidth - 1) < 0.05
    units = {"v2": 1, "v3": 2, "v4": 4, "v5e": 4, "v5p": 8, "v6e": 16, "tpu7x": 16}
    for name, count in units.items():
        chip, size = CHIPS[name], count * 128**2
        assert 2 * size * chip.clock == pytest.approx(chip.peak("bfloat16"), rel=0.01), name


def test_cpu_is_the_processor_at_hand_and_its_memory():
    target = Target("cpu")
    assert target.platform == "cpu" and set(target.devices) == set(jax.devices("cpu"))
    assert target.chip.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert target.chip.clock == 0 and not target.chip.peaks
    assert Target("here").devices.size == len(jax.devices())


def test_a_mesh_has_all_devices_of_a_target():
    target = Target("cpu")
    count = target.devices.size
    assert dict(target.mesh().shape) == {"data": count}
    assert dict(target.mesh({"a": count, "b": 1}).shape) == {"a": count, "b": 1}
    with pytest.raises(ValueError, match="A mesh of data=3, fsdp=5 has 15 devices, but cpu has"):
        target.mesh({"data": 3, "fsdp": 5})


@pytest.mark.parametrize(
    ("name", "said", "error", "message"),
    [
        ("a100:4", "no plugin\nmore", RuntimeError, r"for a100:4: no plugin\. .*pip install"),
        (
            *("v5e:3x3", "INVALID_ARGUMENT: not divisible", ValueError),
            r"There is no topology 'v5e:3x3': .*not divisible\. A host .* even, as in v5e:4x4\.",
        ),
        ("v5e", "no plugin", RuntimeError, "No compiler for v5e"),
    ],
)
def test_a_topology_that_can_not_be_made_says_why(monkeypatch, name, said, error, message):
    seen: dict[str, object] = {}

    def rejected(**given):
        seen.update(given, skip=os.environ.get("TPU_SKIP_MDS_QUERY"))
        raise RuntimeError(said)

    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", rejected)
    targets._topology.cache_clear()
    with pytest.raises(error, match=message):
        _ = Target(name).devices
    if name == "v5e":  # the compilers' environment is set while they load, and only then
        one_chip = {"topology_name": "v5e:1x1", "chips_per_host_bounds": (1, 1, 1)}
        assert seen == {"platform": "tpu", "skip": "1"} | one_chip
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def written(folder, contents):
    path = folder / "mine.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return str(path)


def test_a_file_changes_the_figures_of_the_gpu_that_it_is_like(tmp_path):
    figures = {"like": "a100", "memory": 4e10, "peaks": {"bfloat16": 1e14}, "accelerated": False}
    path = written(tmp_path, figures | {"cores": 90, "capability": [8, 6]})
    chip = targets.own_gpu(path)
    assert chip.memory == 4e10 and chip.peaks == {**CHIPS["a100"].peaks, "bfloat16": 1e14}
    assert chip.bandwidth == CHIPS["a100"].bandwidth and chip.source == path
    changed = {"cores": 90, "capability": [8, 6], "memory_bandwidth": int(chip.bandwidth)}
    assert chip.device == {**CHIPS["a100"].device, **changed}
    for line in ("core_count: 90", "device_memory_size: 40000000000", "major: 8 minor: 6"):
        assert line in chip.target_config()
    target = Target(f"{path}:8")
    assert target.kind == path and target.platform == "cuda" and target.chip == chip


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "can't be read as JSON: "),
        ("[]", "should hold one JSON object, but holds a list"),
        ({"like": "h1"}, "'like' should be one of a100, h100, h200, b200, but is 'h1'"),
        ({"memroy": 1e9}, "unknown figure 'memroy'. Known figures: like, memory, "),
        ({"memory": "80 GB"}, "'memory' should have the form of 84942979072, but is '80 GB'"),
        ({"peaks": {"bfloat16": 0}}, "'peaks' should have the form of "),
        ({"capability": [9]}, r"'capability' should have the form of \[9, 0\], but is \[9\]"),
    ],
)
def test_a_file_of_other_contents_is_rejected_by_name(tmp_path, contents, message):
    path = written(tmp_path, contents)
    with pytest.raises(ValueError, match=message) as raised:
        _ = Target(path).chip
    assert path in str(raised.value)


H100, V5E = CHIPS["h100"], CHIPS["v5e"]
SECONDS: Any = kernel_time(H100)
UNPUBLISHED = Chip("cpu", 0.0, 0.0, {}, 0.0, 0.0, "")


@pytest.mark.parametrize(
    ("flops", "moved", "seconds"),
    [
        ({"bfloat16": 989.5e12}, 0.0, 1.0),
        ({"bfloat16": 989.5e12}, 2 * 3350e9, 2.0),  # the longer of computing and moving
        ({}, 3350e9, 1.0),
        ({"bfloat16": 989.5e12, "float32": 494.75e12}, 0.0, 2.0),  # one after the other
        ({"float8_e4m3fn": 1979e12}, 0.0, 1.0),
        ({"float32": 494.75e12}, 0.0, 1.0),
        ({"float32, highest": 67e12}, 0.0, 1.0),
        ({"float32, bfloat16 x3": 989.5e12}, 0.0, 3.0),
        ({"float32, tf32 x3": 494.75e12}, 0.0, 3.0),
        ({"float64": 67e12}, 0.0, 1.0),
    ],
)
def test_a_kernel_takes_what_its_matmuls_or_its_bytes_take_at_the_peaks(flops, moved, seconds):
    assert SECONDS(flops, moved) == pytest.approx(seconds)


def test_float32_has_peaks_by_its_precision():
    highest = {"a100": 19.5e12, "h100": 67e12, "h200": 67e12, "b200": 75e12}
    for name, flops in highest.items():  # without tensor cores
        assert CHIPS[name].peak("float32, highest") == flops < CHIPS[name].peak("float32")
    passes = {"float32": 1, "float32, high": 3, "float32, highest": 6}
    for name in ("v5e", "v6e", "tpu7x"):
        chip = CHIPS[name]
        assert {key: chip.peak("bfloat16") / chip.peak(key) for key in passes} == passes
    # An unlisted precision has the peak of its dtype.
    assert H100.peak("float32, high") == H100.peak("float32")
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
    assert targets.exchange_seconds(V5E, sent) == 250e9 / 200e9
    assert targets.exchange_seconds(UNPUBLISHED, sent) is None
    assert targets.exchange_seconds(UNPUBLISHED, {}) == 0.0
