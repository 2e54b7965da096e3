"""Growth of programs: the counts, and that none of ours bends upwards."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import scale, scale_devices, scale_lines, scale_params
from benchmarks.scale_models import PROGRAMS, Program
from policy.programs.subprograms import programs_of

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


def test_a_row_beside_its_reference_and_one_for_each_line(monkeypatch):
    def programs(slope):
        def make(layers):
            def loss(p):
                for _ in range(slope * layers):
                    p = p + 1.0
                return p.sum()

            return Program(loss, jax.ShapeDtypeStruct((2,), jnp.float32), ())

        return make

    monkeypatch.setitem(scale.PROGRAMS, "twice", programs(2))
    monkeypatch.setitem(scale.PROGRAMS, "once", programs(1))
    beside, hand, ours = scale.layer_rows("once", ("twice",), (1, 2, 4), ("equations",), 1)
    assert (beside.name, beside.bound) == (
        "twice beside once, 4 layers",
        None,
    ) and 1 < beside.ratio < 2
    assert (hand.name, hand.bound, hand.ratio) == ("once, 2-4 / 1-2", None, 1)
    assert (ours.ours, ours.reference, ours.is_missed) == (2, 2, False)


def test_params_have_the_sizes_of_their_names():
    for name in scale_params.SIZES:
        count = scale_params.elements(scale_params.params(name, jnp.bfloat16, stacked=True))
        assert count / 1e9 == pytest.approx(float(name[:-1]), rel=0.05)
    whole = scale_params.params("0.14B", jnp.float32)
    assert scale_params.elements(whole) == scale_params.elements(
        scale_params.params("0.14B", jnp.float32, stacked=True)
    )
    assert scale_params.elements(scale_params.params("70B", jnp.float32, stacked=True)) > 69e9


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


def test_programs_that_grow_with_devices_must_not_grow_faster_than_by_hand(monkeypatch):
    def figures(start, each):
        return {
            n: {
                "held": 8.0,
                "temporary": 4.0,
                "instructions": start + each * n,
                "compiling": 1.0 + n,
            }
            for n in (1, 2, 4, 8)
        }

    def rows(each):
        found = {"ours": figures(300, each), "by hand": figures(100, 12)}
        monkeypatch.setattr(scale_devices, "in_own_process", lambda _: found)
        return [row.name for row in scale_devices.compiled_rows((1, 2, 4, 8)) if row.is_missed]

    assert rows(12) == []
    assert rows(13) == ["sharded less by hand, 8 / 2 devices"]


def test_compiling_for_devices_that_are_not_there_says_what_to_do():
    with pytest.raises(
        RuntimeError, match=r"This process has 1 devices, not 3: start it with XLA_FLAGS=.*count=3"
    ):
        scale_devices.compiled_on(3, ours=True)


def test_a_compiled_step_holds_its_share_of_params_and_state():
    one = scale_devices.compiled_on(1, ours=True)
    elements = sum(leaf.size for leaf in scale_devices._params().values())
    batch = 4 * scale_devices.BATCH * scale_devices.WIDTH
    assert one["held"] == pytest.approx(12 * elements + batch, abs=64)
    assert one["instructions"] > 50 and one["compiling"] > 0
