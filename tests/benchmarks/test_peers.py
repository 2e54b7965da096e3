"""Models beside jmp's and mpx's: the same parameters, and a peer that is missing is named."""

import math

import jax
import pytest

from benchmarks import models, peers

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")

MLP, DECODER = (
    next(c for c in models.cases(small=True) if c.model == name) for name in peers.TWINS
)


def params_of(program):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.arguments[0]))


@pytest.mark.parametrize("case", [MLP, DECODER], ids=lambda case: case.name)
def test_the_equinox_twin_has_the_params_and_matmuls_of_the_model(case):
    pytest.importorskip("mpx", reason="mpx is not installed: pip install mixed-precision-for-jax")
    ours, twin = case.programs("linen")["ours"], peers.mpx_program(case)
    assert params_of(twin) == params_of(ours)
    assert models.lowered(twin)["flops"] == pytest.approx(models.lowered(ours)["flops"], rel=0.01)


def test_jmps_model_multiplies_in_half():
    pytest.importorskip("jmp", reason="jmp is not installed: pip install jmp")
    program = peers.jmp_program(MLP)
    text = jax.jit(program.step).lower(*program.arguments).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products and all("bf16" in line and "xf32" not in line for line in products)
