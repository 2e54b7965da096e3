"""The byte budget of an optimizer step: compiled, not run."""

import jax
import pytest

from benchmarks.optimizer import LARGEST_TEMPORARY, Pipeline, measure, pipelines, plain

TABLE = {row.name: row for row in pipelines()}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="budgets are XLA:CPU's count")
@pytest.mark.parametrize(
    "name", ["f32 / bf16, no skipping", "f32 / bf16", "remainder, bf16 / bf16"]
)
def test_an_adamw_step_stays_within_its_byte_budget(name):
    row = TABLE[name]
    assert row.budget is not None
    moved, temporary = measure(row)
    assert moved <= row.budget
    assert temporary <= LARGEST_TEMPORARY


def add():
    return lambda p: p, lambda p, s, g: (jax.tree.map(lambda a, b: a + b, p, g), s)


def test_a_row_counts_the_bytes_of_its_program():
    moved, _ = measure(Pipeline("", "float32", "float32", add))
    assert moved == pytest.approx(4 + 4 + 4)
    with jax.numpy_dtype_promotion("standard"):
        assert measure(Pipeline("", "float32", "bfloat16", plain))[0] >= 26
