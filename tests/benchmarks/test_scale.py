"""Growth of programs: the counts, and that none of ours bends upwards."""

from typing import Any

import jax
import pytest

from benchmarks import scale, scale_devices, scale_lines, scale_params
from benchmarks.scale_models import PROGRAMS
from policy.programs.jaxprs import programs_of

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


def test_one_more_costs_as_much_at_the_far_end_where_a_line_is_straight():
    xs = (2, 6, 12, 24, 48)
    assert scale_lines.growth(xs, [5 + 3 * x for x in xs]) == (3, 3)
    row = scale_lines.straight("equations", "square", xs, [x**2 for x in xs], 1.5)
    assert row.name == "square, 24-48 / 2-12"
    assert row.ratio == pytest.approx((48 + 24) / (2 + 12)) and row.is_missed
    assert not scale_lines.straight("equations", "constant", xs, [7] * 5, 1.01).is_missed
    assert scale_lines.straight("equations", "two steps", (1, 2, 4), [1, 2, 4], 1.0).ratio == 1


@pytest.fixture(scope="module")
def sizes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        few = {
            name: [scale.sizes((name,), n, 1)[name] for n in (1, 2)]
            for name in ("linen", "scanned")
        }
        few["linen"].append(scale.sizes(("linen",), 3, 1)["linen"])
        return few


@pytest.mark.parametrize("quantity", scale.COUNTED)
def test_each_layer_adds_as_many_equations_lines_and_saved_bytes_as_the_one_before(sizes, quantity):
    counts = [getattr(size, quantity) for size in sizes["linen"]]
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


def test_a_scanned_layer_adds_saved_bytes_and_no_equations(sizes):
    one, two = sizes["scanned"]
    assert one.equations == two.equations
    assert two.saved - one.saved == pytest.approx(
        sizes["linen"][2].saved - sizes["linen"][1].saved, abs=8
    )


@pytest.mark.parametrize("name", ["nnx", "apply_policy", "autocast", "linen, a path rule a layer"])
def test_every_program_multiplies_in_bfloat16(name):
    program = PROGRAMS[name](1)
    jaxpr: Any = jax.make_jaxpr(program.loss)(*program.arguments).jaxpr
    assert {v.aval.dtype.name for eqn in _dots(jaxpr) for v in eqn.invars} == {"bfloat16"}


def _dots(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in programs_of(equation):
            yield from _dots(inner)


def test_state_costs_at_70_billion_params_what_it_costs_at_the_start():
    rows = list(scale_params.state_rows())
    assert [row.name for row in rows if row.is_missed] == []
    names = [row.name.split(", ", 1)[1].removesuffix(", beside optax") for row in rows]
    bytes_of = dict(zip(names[::2], (row.ours for row in rows[::2]), strict=True))
    kinds = ("float32", "bfloat16, full masters", "bfloat16, remainder", "bfloat16, no masters")
    assert [round(bytes_of[kind], 6) for kind in kinds] == [12, 14, 12, 10]


def test_a_traced_step_exchanges_as_much_on_64_devices_as_on_two():
    rows = list(scale_devices.traced_rows((2, 64)))
    assert [row.name for row in rows if row.is_missed] == []
    assert {row.quantity: row.ours for row in rows}["wire"] == pytest.approx(
        2, rel=0.001
    )  # bfloat16
