"""Models and layers beside Flax by hand: counted, not compiled, and what is counted is what it
says.
"""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import layers, models
from benchmarks.table import Row

pytestmark = pytest.mark.usefixtures("as_the_benchmark_runs")


SMALL = [case for case in models.cases(small=True) if case.model in ("Mlp", "ResNet")]


def of_case(rows: list[Row], name: str) -> dict[str, Row]:
    return {row.quantity: row for row in rows if row.name == name}


@pytest.mark.parametrize("wing", models.WINGS)
def test_an_mlp_under_a_policy_is_the_mlp_by_hand(wing):
    programs = SMALL[0].programs(wing)
    ours, hand = (models.lowered(programs[name]) for name in ("ours", "hand"))
    assert ours["flops"] == hand["flops"] and ours["converts"] == hand["converts"]
    assert ours["bytes"] <= hand["bytes"]  # relu is no call of its own
    assert models.saved_bytes(programs["ours"]) == models.saved_bytes(programs["hand"])
    dtypes = {
        jnp.dtype(leaf.dtype)
        for leaf in jax.tree.leaves(
            jax.eval_shape(programs["ours"].step, *programs["ours"].arguments)
        )
    }
    assert dtypes == {jnp.dtype("float32")}


@pytest.mark.parametrize("wing", models.WINGS)
def test_a_resnet_saves_half_of_what_flax_saves(wing):
    programs = SMALL[-1].programs(wing)
    assert models.saved_bytes(programs["ours"]) < 0.6 * models.saved_bytes(programs["hand"])


def test_every_layer_in_both_wings_is_within_its_bounds():
    found = list(layers.rows(small=True))
    assert {row.name.rpartition(", ")[0] for row in found} == {case.name for case in layers.CASES}
    assert [row.name for row in found if row.is_missed] == []
    repaired = of_case(found, "LayerNorm, linen")
    assert repaired["saved"].ratio < 0.3 and repaired["saved"].note == layers.EXACT


def test_without_its_policy_a_layer_misses_its_bounds(monkeypatch):
    monkeypatch.setattr(layers, "POLICY", "float32")
    monkeypatch.setattr(layers, "CASES", layers.CASES[:2])
    assert {row.quantity for row in layers.rows(small=True) if row.is_missed} >= {"bytes", "saved"}


def test_the_wings_models_have_the_same_parameters():
    for case in models.cases(small=True):
        counts = [
            sum(leaf.size for leaf in jax.tree.leaves(case.programs(wing)[name].arguments[0]))
            for wing in models.WINGS
            for name in ("ours", "hand")
        ]
        assert len(set(counts)) == 1, case.name
