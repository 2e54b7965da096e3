"""The table of memory: what is read of the system, the steps' shapes, and a tiny step's row."""

import concurrent.futures
import math
import mmap
import multiprocessing
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as everything
from benchmarks import memory, memory_job
from benchmarks.memory_steps import STEPS, Step
from policy.optim import finite_of

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")

STATUS = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def doubling(size: int) -> Step:
    """A step that returns its donated argument, doubled, and a sum."""
    array = jax.ShapeDtypeStruct((size,), jnp.float32)

    def step(params, opt_state, state, x, y):
        return params * 2, opt_state, state, x.sum() + y.sum()

    return Step(step, (array, (), (), array, array), lambda params: ())


def compiled(step: Step):
    return jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()


def test_a_field_of_proc_is_read_in_bytes():
    assert memory_job.status_bytes(STATUS, "VmHWM") == 2048 * 1024
    with pytest.raises(ValueError, match=r"^/proc/self/status has no VmSwap: .* needs Linux\.$"):
        memory_job.status_bytes(STATUS, "VmSwap")


@on_linux
def test_the_peak_starts_at_what_is_resident_and_keeps_what_was_freed():
    memory_job.reset_peak()
    before = memory_job.resident()
    assert memory_job.peak_resident() - before < 2**20
    with mmap.mmap(-1, 2**24) as pages:  # malloc may hand out what is resident already
        for page in range(0, 2**24, mmap.PAGESIZE):
            pages[page] = 1
    assert 15 * 2**20 < memory_job.peak_resident() - before < 20 * 2**20
    memory_job.reset_peak()
    assert memory_job.peak_resident() - before < 8 * 2**20


def measured_doubling(size: int) -> int:
    step = doubling(size)
    return memory_job.measured(step, compiled(step))


@pytest.mark.slow
@on_linux
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
def test_arguments_are_those_of_a_start_of_training():
    step = STEPS["LSTM, nnx, mixed_float16, loss scale"](True)
    programs = memory_job.makers(step)
    params, state, rest, x, y = jax.tree.map(lambda make: make(jax.random.key(0)), programs)
    made = jax.tree.leaves((params, state, rest, x, y))
    for leaf, planned in zip(made, jax.tree.leaves(step.arguments), strict=True):
        assert (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
    assert jnp.unique(x).size > 10 and jnp.issubdtype(y.dtype, jnp.integer)
    assert float(state.loss_scale.loss_scale) == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_no_step_is_skipped(name):
    step = STEPS[name](True)
    arguments = jax.tree.map(lambda make: make(jax.random.key(0)), memory_job.makers(step))
    _, state, _, loss = compiled(step)(*arguments)
    assert bool(finite_of(state)) and math.isfinite(loss)


def test_a_row_is_missed_where_the_estimate_is_off_by_more_than_a_tenth():
    def row(estimated, small=False):
        plan = {"arguments": 2.0**30}
        figures = {"estimated": estimated, "measured": 100.0, "plan": plan, "device": "H100"}
        return memory.row_of("MLP", "here", figures, small)

    missed = [size for size in (89.0, 91.0, 109.0, 111.0) if row(size).is_missed]
    assert missed == [89.0, 111.0] and not row(50.0, small=True).is_missed
    assert row(100.0).target == "H100" and row(100.0).note == "GiB: arguments 1.00"


def test_on_and_only_reach_the_table_of_memory(monkeypatch):
    called = []
    monkeypatch.setattr(everything, "run", lambda *given: (called.append(given[-1]), (0, []))[1])
    monkeypatch.setattr(everything, "_write", lambda *given: None)
    assert everything.main(["memory", "--on", "here", "--only", "MLP"]) == 0
    assert called == [["--only", "MLP", "--on", "here"]]


@pytest.mark.slow
@on_linux
def test_a_tiny_step_is_measured_by_the_command(capsys):
    assert memory.main(["--small", "--only", "MLP", "--check"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("memory") and "MLP, linen, float32, AdamW" in line and "GiB" in line
