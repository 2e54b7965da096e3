"""The GPU's table: each measurement in the smallest size on the CPU, and what the run does when
time or luck is out.
"""

import json
import math
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import gpu, gpu_measures, gpu_models, gpu_timing, linen_models
from benchmarks.gpu_measures import Line, Sizes
from benchmarks.gpu_models import SETTINGS
from benchmarks.gpu_peaks import PEAKS
from benchmarks.gpu_timing import Stepper, Timing

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")

SIZES = Sizes.of(16e9, tiny=True)
FLAX: Any = flax.linen
MODELS = gpu_models.models(16e9, tiny=True)
PEAK = PEAKS["NVIDIA A100"]


def test_programs_are_timed_in_turn_and_their_ratios_spread_as_they_differ():
    order: list[str] = []

    def program(name, seconds):
        def call(times):
            order.append(name)
            return times * next(seconds)

        return call

    slow, fast = iter([9.0, 2.0, 2.0, 4.0, 3.0]), iter([9.0, 1.0, 1.0, 1.0, 1.0])
    found = gpu_timing.interleaved(
        {"slow": program("slow", slow), "fast": program("fast", fast)}, sample_seconds=0.1, rounds=3
    )
    assert order[4:] == ["slow", "fast"] * 3
    assert found["slow"] == Timing(3.0, (2.0, 4.0, 3.0))
    assert gpu_timing.spread(found["slow"], found["fast"]) == pytest.approx((4 - 2) / 2 / 3)


def test_a_stepper_threads_its_carry_through_and_plans_memory():
    step = Stepper.of(lambda x, y: (x + y, x.sum()), jnp.zeros(8), jnp.ones(8))
    step(2)
    step(1)
    np.testing.assert_array_equal(step.carry, np.full(8, 3.0, np.float32))
    assert step.kernel == "XLA"
    assert (
        2 * 8 * 4 + 4 <= step.planned_bytes < 2 * 8 * 4 + 256
    )  # two inputs, one of them an output too, and a sum


def test_flops_are_two_for_each_multiplication_of_matmuls_and_convolutions():
    x, w, kernel = jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((3, 3, 4, 6))
    assert (
        gpu_models.matmul_flops(jax.make_jaxpr(jax.jit(lambda x: x @ w))(x).jaxpr) == 2 * 2 * 3 * 5
    )

    def convolve(x):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    found = gpu_models.matmul_flops(jax.make_jaxpr(convolve)(jnp.ones((1, 8, 8, 4))).jaxpr)
    assert found == 2 * (4 * 4 * 6) * (3 * 3 * 4)


def test_the_models_have_the_sizes_that_are_known():
    models = gpu_models.models(80e9, tiny=False)
    resnet = gpu_models.forward_flops(models["ResNet-50"]) / 256
    assert resnet == pytest.approx(2 * 4.09e9, rel=0.02)  # torchvision: 4.09 G multiplications
    decoder = models["decoder"]
    shapes = jax.eval_shape(decoder.make(flax.linen, None).init, jax.random.key(0), decoder.x)[
        "params"
    ]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == pytest.approx(
        12 * 12 * 768**2 + 66e6 * 768 / 1000, rel=0.02
    )
    assert (decoder.count, models["ViT-S"].count, decoder.classes) == (8 * 1024, 256, 32768)
    assert gpu_models.models(13e9, tiny=False)["decoder"].count == 1024  # a GPU of 16 GB


def test_a_matmul_a_copy_and_a_step_are_measured_beside_the_device():
    lines = [*gpu_measures.matmul(SETTINGS["TF32"], SIZES, PEAK), *gpu_measures.copy(SIZES, None)]
    lines += gpu_measures.optimizer_step(
        "f32 / bf16, no skipping", SIZES, "plain optax, f32 params, bf16 gradients"
    )
    multiplied, copied, *steps = lines
    assert multiplied.reference == 156
    assert multiplied.share == pytest.approx(multiplied.ratio)
    assert (
        copied.share is None
        and math.isnan(copied.reference)
        and copied.as_json()["reference"] is None
    )
    assert "unknown" in gpu.shown(copied) and "nan" not in gpu.shown(copied)
    assert [line.name.rsplit(" ", 1)[1] for line in steps] == ["copy", "optax"]
    assert all(line.ours > 0 and line.spread is not None for line in steps)


def test_attention_is_measured_with_its_kernels():
    rate, memory = gpu_measures.attention(SETTINGS["bf16"], SIZES)
    assert rate.note == "XLA, XLA"
    assert rate.ratio > 0 and 0 < memory.ratio < 2


def test_both_train_steps_of_a_model_step_the_same_params_to_nearly_the_same_place():
    """In float16, with a loss scale that grows and skips on either side; batch statistics too."""
    setting = SETTINGS["f16"]

    def make(nn, dtype):
        norm = nn.BatchNorm(use_running_average=False, dtype=dtype)
        return nn.Sequential([nn.Dense(8, dtype=dtype), norm, nn.Dense(4, dtype=dtype)])

    x, y = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    model = gpu_models.Model("dense", make, x, y, "tokens/s", optax.sgd(1e-2))
    ours, hand = (
        gpu_models.stepper(model, setting, make) for make in (gpu_models.ours, gpu_models.by_hand)
    )
    before = gpu_models.variables(model)
    for step in (ours, hand):
        step(2)
    assert jax.tree.structure(ours.carry[0]) == jax.tree.structure(hand.carry[0])
    moved = [
        np.abs(np.asarray(a) - b).max()
        for a, b in zip(*(map(jax.tree.leaves, (ours.carry[2], before[1]))), strict=True)
    ]
    assert min(moved) > 0
    for a, b in zip(jax.tree.leaves(ours.carry[0]), jax.tree.leaves(hand.carry[0]), strict=True):
        # Steps of 1e-2 times gradients of up to 0.5, a few ulps apart.
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    "name, dtype", [("decoder", "bf16"), ("ResNet-50", "f16"), ("ViT-S", "float32")]
)
def test_both_train_steps_trace_and_return_what_they_take(name, dtype):
    model, setting = MODELS[name], SETTINGS[dtype]
    for make in (gpu_models.ours, gpu_models.by_hand):
        init, step = make(model, setting)
        params, state = jax.eval_shape(lambda: gpu_models.variables(model))
        carry = params, jax.eval_shape(init, params), state
        after, loss = jax.eval_shape(step, carry, model.x, model.y)
        assert loss.dtype == jnp.float32
        assert jax.tree.structure(after) == jax.tree.structure(carry)
        assert [a.dtype for a in jax.tree.leaves(after)] == [
            a.dtype for a in jax.tree.leaves(carry)
        ]


def test_a_model_is_measured_beside_by_hand_and_torch():
    x, y = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    make = lambda nn, dtype: linen_models.of(nn).Mlp(dtype, 1, 8)  # noqa: E731
    model = gpu_models.Model("MLP", make, x, y, "tokens/s", optax.sgd(1e-3))
    lines = list(gpu_measures.model(model, SETTINGS["bf16"], SIZES, PEAK, torch=10.0))
    assert [line.quantity for line in lines] == ["tokens/s", "MiB", "compile s", "tokens/s"]
    assert lines[0].note == "attention: XLA, XLA"
    seconds = model.count / lines[0].ours
    assert lines[0].share == pytest.approx(3 * gpu_models.forward_flops(model) / seconds / 312e12)
    assert lines[3].reference == 10.0 and lines[3].name.endswith("torch")


def test_where_torch_cannot_run_a_line_says_so():
    found, said = gpu.torch_rates({"seconds": 5.0}, python="/bin/false")
    assert found == {} and said == "torch: none beside it (it printed nothing)"


def _jobs(*names):
    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        yield

    def runs(name):
        yield Line("tokens/s", name, 2.0, 1.0, spread=0.01, share=0.5)

    return [gpu.Job(n, "model", fails if n == "large" else lambda n=n: runs(n)) for n in names]


def test_a_job_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    report = gpu.Report({"device": "some device"})
    report.run(_jobs("first", "large", "last"), limit=1000)
    report.finish(str(tmp_path / "rows.json"))
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["first", "last"]
    assert written["failed"] == {"large": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    assert (written["device"], written["missing"]) == ("some device", [])
    printed = capsys.readouterr().out
    assert "large failed: RuntimeError" in printed and "1.0%   50%" in printed


def test_the_command_runs_without_a_gpu_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "jobs", lambda *_: _jobs("decoder, bf16", "copy"))
    file = tmp_path / "rows.json"
    assert gpu.main(["--only", "decoder", "--no-torch", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "There is no GPU here" in printed and "peaks: unknown for this device" in printed
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["decoder, bf16"]
    assert written["versions"]["jax"] == jax.__version__ and written["device"] == "cpu"
