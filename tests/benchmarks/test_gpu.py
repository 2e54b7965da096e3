"""The GPU's table: its train steps on the CPU, and what the run does when luck is out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import gpu, gpu_models
from benchmarks.gpu_measures import Line
from benchmarks.gpu_models import SETTINGS

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


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
