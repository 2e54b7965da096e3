"""Tables of estimates: the train steps as shapes, their rows, and the page that is made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.estimates import page
from benchmarks.estimates.tables import MODELS, TARGETS, Choice, Model, Table, tables
from benchmarks.estimates.training import counts_of
from policy import use_policy
from policy.command_line.arguments import mesh_sizes, rows_to_estimate
from policy.command_line.target import target_of

CASES = [
    pytest.param(model, choice, id=f"{model.module}-{choice.name}")
    for model in MODELS
    for choice in model.choices
]
PARAMS = {
    "language_model": 49_653_040,
    "resnet": 25_557_032,  # torchvision's resnet50 has as many
    "smollm2": 134_515_008,
    "decoder_8b": 8_030_261_248,
}


# --------------------------------------------------------------------------------------------------
# Train steps
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "choice"), CASES)
def test_a_step_of_small_sizes_returns_params_and_state_as_it_takes_them(
    model: Model, choice: Choice
):
    module = model.loaded()
    with use_policy(choice.policy):
        step, args = module.example(**dict(choice.options), **module.QUICK)
        *returned, loss = jax.eval_shape(step, *args)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), args[:3])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tuple(returned)) == like
    assert loss.shape == ()
    stored_in = jnp.bfloat16 if choice.policy == "bfloat16" else jnp.float32
    assert {x.dtype for x in jax.tree.leaves(args[0])} == {jnp.dtype(stored_in)}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.module)
def test_a_model_has_as_many_params_as_its_original(model: Model):
    _, args = model.loaded().example()
    assert counts_of(args)["params"] == PARAMS[model.module]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(args))


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def test_tables_are_every_model_on_every_target_or_those_that_are_asked_for():
    assert len(tables()) == len(MODELS) * len(TARGETS)
    (one,) = tables(["smollm2"], ["h100:8"])
    assert (one.model.module, one.target) == ("smollm2", "h100:8")
    with pytest.raises(ValueError, match=r"There is no model 'smolm'\. Those of tables: language"):
        tables(["smolm"])
    with pytest.raises(ValueError, match=r"There is no target 'v5e'\. Those of tables: v5e:1x1"):
        tables(on=["v5e"])


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_stored_results():
    assert page.PAGE.read_text(encoding="utf-8") == page.page()
    assert all(table.file.exists() for table in tables())


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.file.stem)
def test_a_tables_command_names_its_rows_its_target_and_its_mesh(table: Table):
    *_, target, on, devices = table.command[:7]
    assert (on, devices) == ("--on", table.target)
    assert target_of(target) is not None
    given = dict(zip(table.command[5::2], table.command[6::2], strict=True))
    assert mesh_sizes(given.get("--mesh")) == table.mesh
    words = table.command
    asked = [words[i + 1] for i, word in enumerate(words) if word == "--row"]
    found = rows_to_estimate(given["--policies"], asked)
    assert found == {
        choice.name: (choice.policy, dict(choice.options)) for choice in table.model.choices
    }
