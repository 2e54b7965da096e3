"""Steps that benchmarks run: on a GPU, those whose memory is measured, and a comparison."""

import concurrent.futures
import json
import multiprocessing
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import gpu, gpu_models, inspection_compare, memory_job
from benchmarks.gpu_measures import Line
from benchmarks.gpu_models import SETTINGS
from benchmarks.memory_steps import Step


@pytest.fixture(autouse=True)
def as_the_benchmark_runs():
    """Flax's own layers with a half dtype mix dtypes, and so do peers."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
def test_both_train_steps_of_a_model_step_the_same_params_to_nearly_the_same_place():
    """In float16, with a loss scale that grows and skips on either side; batch statistics too."""
    setting = SETTINGS["f16"]

    def make(nn, dtype):
        norm = nn.BatchNorm(use_running_average=False, dtype=dtype)
        return nn.Sequential([nn.Dense(8, dtype=dtype), norm, nn.Dense(4, dtype=dtype)])

    x, y = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    model = gpu_models.Model("dense", make, x, y, "tokens/s", optax.sgd(1e-2))
    ours = gpu_models.stepper(model, setting, gpu_models.ours)
    hand = gpu_models.stepper(model, setting, gpu_models.by_hand)
    before = gpu_models.variables(model)
    for step in (ours, hand):
        step(2)
    assert jax.tree.structure(ours.carry[0]) == jax.tree.structure(hand.carry[0])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, ours.carry[2], before[1])
    assert all(jax.tree.leaves(moved))
    for a, b in zip(jax.tree.leaves(ours.carry[0]), jax.tree.leaves(hand.carry[0]), strict=True):
        # Steps of 1e-2 times gradients of up to 0.5, a few ulps apart.
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_job_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        yield

    def runs():
        yield Line("tokens/s", "small", 2.0, 1.0, spread=0.01)

    report = gpu.Report({"device": "some device"})
    report.run([gpu.Job("large", "model", fails), gpu.Job("small", "model", runs)], limit=1000)
    report.finish(str(tmp_path / "rows.json"))
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["small"]
    assert written["failed"] == {"large": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    assert (written["device"], written["missing"]) == ("some device", [])
    printed = capsys.readouterr().out
    assert "large failed: RuntimeError" in printed and "1.0%" in printed


def doubling(size: int) -> Step:
    """A step that returns its donated argument, doubled, and a sum."""
    array = jax.ShapeDtypeStruct((size,), jnp.float32)

    def step(params, opt_state, state, x, y):
        return params * 2, opt_state, state, x.sum() + y.sum()

    return Step(step, (array, (), (), array, array), lambda params: ())


def measured_doubling(size: int) -> int:
    step = doubling(size)
    jitted = jax.jit(step.function, donate_argnums=step.donated)
    return memory_job.measured(step, jitted.lower(*step.arguments).compile())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_donated_argument_counts_once_and_the_others_too():
    size = 2**22  # three arrays of 16 MiB, of which one is overwritten
    plan = memory_job.estimated(doubling(size), "cpu")
    assert plan["arguments"] == 3 * 2**24 and plan["outputs"] < 1024
    # A process that has run other tests holds free memory, by which the peak would grow less.
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, fresh) as pool:
        measured = pool.submit(measured_doubling, size).result()
    assert measured == pytest.approx(sum(plan.values()), rel=0.25)


@pytest.mark.slow
def test_a_comparison_needs_no_more_than_its_bounds_say():
    case = inspection_compare.Case("ours", inspection_compare.Ours(1, 64), 64, batch=8, length=32)
    found = {row.quantity: row for row in inspection_compare.step(case, times=0)}
    assert not found["flops"].is_missed and not found["memory"].is_missed
    assert found["flops"].ratio > 2, "both programs are in it"
