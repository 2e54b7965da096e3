"""The GPU's table: each measurement in the smallest size on the CPU, and what the run does when
time or luck is out.
"""

import json

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import gpu, gpu_measures, gpu_models, linen_models
from benchmarks.gpu_measures import Line, Sizes
from benchmarks.gpu_models import SETTINGS
from benchmarks.gpu_peaks import PEAKS

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")

SIZES = Sizes.of(16e9, tiny=True)
PEAK = PEAKS["NVIDIA A100"]


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
