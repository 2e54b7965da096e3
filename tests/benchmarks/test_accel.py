"""The command `python -m benchmarks accel`, and programs that a TPU v5e and an H100 get."""

import dataclasses
import re
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import page
from benchmarks.accel import __main__ as command
from benchmarks.accel import accumulators, baseline, eight_bits, precision, report
from benchmarks.accel.program import Figures, placed
from mpmodules import linen
from policy.inspect.estimate import targets as compilers
from policy.inspect.estimate.targets import Target
from policy.inspect.hlo.dump import without_cache
from tests.benchmarks import accelerators

V5E = Target("v5e:1x1")
PLAIN = Figures(
    cycles=1500.0,
    bytes=100.0,
    moved=90.0,
    has_loops=False,
    temporary=10.0,
    arguments=5.0,
    kernels=3,
    flops=1.0,
    collectives={},
    exchange=0.0,
    uncounted=(),
    rooflines=(),
    seconds=0.1,
)


@pytest.fixture(autouse=True, scope="module")
def without_a_cache_of_programs():
    """The compilers can't read what they wrote there without an accelerator."""
    with without_cache():
        yield


def test_rows_have_bounds_and_say_what_they_leave_out():
    dearer = dataclasses.replace(PLAIN, cycles=1600.0)
    rows = {r.quantity: r for r in report.rows_of("x", V5E, dearer, PLAIN, {"cycles": 1.05})}
    assert rows["cycles"].is_missed and not rows["bytes"].is_missed and rows["bytes"].bound is None
    assert "seconds" not in rows and "exchange" not in rows
    left_out = dataclasses.replace(PLAIN, uncounted=("the trip count of while.1 (f)",))
    rows = {r.quantity: r for r in report.rows_of("x", V5E, left_out, PLAIN)}
    assert {name for name, row in rows.items() if row.is_missed} == {"cycles", "bytes", "kernels"}
    assert "not counted: the trip count of while.1 (f)" in command.line(rows["cycles"])


@pytest.fixture
def fake_table(tmp_path, monkeypatch):
    """A table of one row in place of all, and compilers that are there."""
    (tmp_path / "fake_accel.py").write_text(
        "import sys\nfrom benchmarks.table import Row, run\n"
        "def rows(small, on=()):\n"
        "    yield Row('cycles', 'x', 3.0, 2.0, None if small else 1.0, target=(on or "
        "['v5e:1x1'])[0])\n"
        "sys.exit(run('a table', rows, 'hand')) if __name__ == '__main__' else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{page.__file__.rpartition('/benchmarks/')[0]}")
    monkeypatch.setattr(command, "TABLES", {"fake": command.Table("fake_accel", ("v5e", "h100"))})
    monkeypatch.setattr(command, "QUICK", ("fake",))
    monkeypatch.setattr(Target, "devices", [None])
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    yield tmp_path
    sys.modules.pop("fake_accel", None)


def test_the_command_fails_where_a_bound_is_missed_or_a_baseline_got_dearer(fake_table, capfd):
    assert command.main(["--quick", "--check"]) == 0
    assert "1 baselines are not recorded: fake, quick on v5e:1x1" in capfd.readouterr().out
    assert command.main(["--check", "--on", "h100"]) == 1
    said = capfd.readouterr().err
    assert "missed: cycles of x on h100: 1.5000, bound 1" in said
    assert "missed a bound: fake" in said
    assert command.main(["--quick", "--record"]) == 0
    assert command.main(["--quick", "--check"]) == 0
    file = fake_table / "baseline.json"
    file.write_text(file.read_text().replace('"cycles": 2.0', '"cycles": 1.5'))
    assert command.main(["--quick", "--check"]) == 1
    said = capfd.readouterr().err
    assert "dearer than recorded: cycles of by hand: x on v5e:1x1: 1.3333, bound 1.02" in said
    assert "missed a bound: baseline" in said


def test_without_compilers_the_command_says_so_in_a_line(monkeypatch, capsys):
    def missing(**_):
        raise RuntimeError("no plugin")

    compilers._topology.cache_clear()
    monkeypatch.setattr(compilers.topologies, "get_topology_desc", missing)
    assert command.main(["--only", "models"]) == 2
    assert capsys.readouterr().err == f"No compiler for v5e:1x1: no plugin. {compilers.INSTALL}\n"


def test_a_row_of_precisions_misses_its_bounds_by_precision_and_by_error():
    errors = {"bfloat16": 3e-3, "default": 2e-3, "high": 4e-6, "highest": 4e-7}
    cycles = {str(level): 2.0 for level in precision.PRECISIONS}
    row = precision.Row("Dense", ("highest",) * 3, cycles, errors)
    assert list(row.missed()) == []
    mixed = dataclasses.replace(row, precisions=("highest", "default", "highest"))
    (told,) = mixed.missed()
    assert "highest, default, highest" in told
    (told,) = dataclasses.replace(row, errors=errors | {"highest": 2e-3}).missed()
    assert "2.0e-03" in told


@pytest.mark.slow
def test_a_router_multiplies_at_the_highest_precision_on_both_chips():
    for name in precision.TARGETS:
        accelerators.target(name)
    (case,) = (case for case in precision.CASES if "router" in case.name)
    found = precision.row_of(case)
    assert list(found.missed()) == []
    assert found.errors["default"] > 1e3 * found.errors["highest"]
    assert found.cycles["default"] <= found.cycles["high"] <= found.cycles["highest"]


PRODUCTS = {
    ("v5e:1x1", "int8"): r"= s32\[\S* convolution\(",
    ("h100", "int8"): r"gemm_fusion\S*computation \(\S+ s8\[\S+ \S+ s8\[",
    ("h100", "float8"): r"gemm_fusion\S*computation \(\S+ f8e\w+\[\S+ \S+ f8e\w+\[",
}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(("name", "kind"), PRODUCTS)
def test_chips_multiply_8_bits_by_8_bits_forward_and_backward(name, kind):
    target, width = accelerators.target(name), 512
    layer = linen.Dense(width, use_bias=False, dtype_policy=eight_bits.POLICIES[kind])
    x = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)

    def step(params: Any, x: jax.Array, ct: jax.Array) -> tuple[Any, ...]:
        y, pullback = jax.vjp(layer.apply, params, x)
        return y, *pullback(ct)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        traced = jax.jit(step).trace(*placed(target, (params, x, x)))
        text = str(traced.lower(lowering_platforms=(target.platform,)).compile().as_text())
    assert len(re.findall(PRODUCTS[name, kind], text)) == 3


@pytest.mark.slow
def test_gradients_that_are_accumulators_cost_no_more_cycles_or_bytes():
    accelerators.target("v5e:2x2")
    rows = {row.quantity: row for row in accumulators.rows(small=True, on=["v5e"])}
    assert rows["cycles"].ratio <= 1 and rows["bytes"].ratio <= 1.001 and rows["kernels"].ratio < 1
    assert "f32" in rows["exchange"].note and "bf16" not in rows["exchange"].note
