"""The table of memory: what is read of the system, the steps' shapes, and a tiny step's row."""

import concurrent.futures
import multiprocessing
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import memory, memory_job
from benchmarks.memory_steps import Step

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def doubling(size: int) -> Step:
    """A step that returns its donated argument, doubled, and a sum."""
    array = jax.ShapeDtypeStruct((size,), jnp.float32)

    def step(params, opt_state, state, x, y):
        return params * 2, opt_state, state, x.sum() + y.sum()

    return Step(step, (array, (), (), array, array), lambda params: ())


def compiled(step: Step):
    return jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()


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


def test_a_row_is_missed_where_the_estimate_is_off_by_more_than_a_tenth():
    def row(estimated, small=False):
        plan = {"arguments": 2.0**30}
        figures = {"estimated": estimated, "measured": 100.0, "plan": plan, "device": "H100"}
        return memory.row_of("MLP", "here", figures, small)

    missed = [size for size in (89.0, 91.0, 109.0, 111.0) if row(size).is_missed]
    assert missed == [89.0, 111.0] and not row(50.0, small=True).is_missed
    assert row(100.0).target == "H100" and row(100.0).note == "GiB: arguments 1.00"
