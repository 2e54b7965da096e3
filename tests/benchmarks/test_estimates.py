"""Tables of estimates: the train steps as shapes, their rows, and the page that is made of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from benchmarks.estimates import __main__ as command
from benchmarks.estimates import page
from benchmarks.estimates import tables as listed
from benchmarks.estimates.tables import MODELS, TARGETS, Choice, Model, Table, record, tables
from benchmarks.estimates.training import counts_of
from policy import use_policy
from policy.command_line.layout import mesh_sizes
from policy.command_line.rows import rows_to_estimate
from policy.command_line.target import target_of
from policy.inspect.estimate.rows import Exchange
from tests.policy.inspect.estimate import estimates
from tests.policy.inspect.estimate.estimates import GIB, estimate_of

CASES = [
    pytest.param(model, choice, id=f"{model.module}-{choice.name}")
    for model in MODELS
    for choice in model.choices
]
DEVICES = {"v5e:1x1": 1, "v5e:16x16": 256, "h100:8": 8}
PARAMS = {
    "language_model": 49_653_040,
    "resnet": 25_557_032,  # torchvision's resnet50 has as many
    "smollm2": 134_515_008,
    "decoder_8b": 8_030_261_248,
}


def abstract_mesh(table: Table) -> AbstractMesh:
    axes = table.mesh or {"data": DEVICES[table.target]}
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


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


@pytest.mark.parametrize("table", tables(on=TARGETS[1:]), ids=lambda table: table.file.stem)
def test_specs_divide_on_every_target_and_the_batch_is_split_over_all_devices(table: Table):
    mesh: Any = abstract_mesh(table)
    module, devices = table.model.loaded(), DEVICES[table.target]
    sizes = {} if table.mesh else module.QUICK  # without a mesh, only the batch is split
    with use_policy("bfloat16"):
        _, args = module.example(mesh=mesh, **sizes)
    shardings = [(x.shape, x.sharding) for x in jax.tree.leaves(args)]
    assert all(isinstance(sharding, NamedSharding) for _, sharding in shardings)
    shards = [sharding.shard_shape(shape) for shape, sharding in shardings]  # raises if not
    batch = len(jax.tree.leaves(args[3]))
    for (shape, _), shard in list(zip(shardings, shards, strict=True))[-batch:]:
        assert math.prod(shape) == devices * math.prod(shard)


def test_the_large_decoder_is_split_but_for_its_norms():
    (table,) = tables(["decoder_8b"], ["v5e:16x16"])
    mesh: Any = abstract_mesh(table)
    with use_policy("bfloat16"):
        _, args = table.model.loaded().example(mesh=mesh)

    def on_a_device(tree: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )

    assert on_a_device(args[:2]) == pytest.approx(12 * PARAMS["decoder_8b"] / 64, rel=0.01)


def test_options_choose_how_the_optimizer_stores_its_state():
    module = MODELS[0].loaded()
    config = dataclasses.replace(module.LM1B, layers=1)

    def nbytes(**options: Any) -> int:
        with use_policy("bfloat16"):
            _, args = module.example(config=config, **options)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[1]))

    count = counts_of(module.example(config=config)[1])["params"]
    assert nbytes() == pytest.approx(10 * count, rel=1e-3)
    assert nbytes(master_weights="stochastic") == pytest.approx(8 * count, rel=1e-3)
    assert nbytes(moment_dtype="bfloat16") == pytest.approx(6 * count, rel=1e-3)
    assert nbytes(moment_dtype="int8") == pytest.approx(4.06 * count, rel=1e-2)


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


cost = functools.partial(
    estimates.cost,
    memory=3 * GIB,
    capacity=4 * GIB,
    arguments=GIB,
    temporaries=2 * GIB,
    outputs=0,
    matmul_flops={"bfloat16": 2e12, "float32": 1e6},
    bytes=2.0 * GIB,
    compute_seconds=0.25,
    collectives=(
        Exchange("all-reduce", "bf16", 2.0**21, 0.5),
        Exchange("all-gather", "bf16", 2.0**21, 0.25),
        Exchange("all-reduce", "f32", 4.0, 0.0),
    ),
    compile_seconds=12.0,
)
buffer_of = functools.partial(
    estimates.buffer, GIB, shape=(2, 3), kind="argument", path="", operation="", source=""
)
COUNTS = {"params": 10, "batch": 20, "flops": 1e12}


def test_a_record_keeps_the_rows_of_the_one_before_and_replaces_those_of_its_names():
    first = record(estimate_of(cost("a", kernels=1), cost("b", kernels=2)), COUNTS)
    second = record(estimate_of(cost("b", kernels=5)), COUNTS, first)
    assert [(row["name"], row["kernels"]) for row in second["rows"]] == [("a", 1), ("b", 5)]
    assert json.loads(json.dumps(second)) == second and second["counts"] == COUNTS


def test_rows_are_stored_in_the_order_of_the_table_and_the_missing_ones_are_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listed, "RESULTS", tmp_path)
    (table,) = tables(["smollm2"], ["h100:8"])
    assert listed.stored(table) is None
    found = record(estimate_of(cost("bfloat16"), cost("float32")), COUNTS)
    listed.store(table, found)
    assert [row["name"] for row in (listed.stored(table) or {})["rows"]] == ["float32", "bfloat16"]
    missing = command.chosen_rows(table, [], missing=True)
    assert [choice.name for choice in missing] == ["mixed_bfloat16"]
    (asked,) = command.chosen_rows(table, ["float32"], missing=False)
    assert asked.name == "float32"


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def test_a_row_shows_its_figures_with_what_is_left():
    row = record(estimate_of(cost("a")), COUNTS)["rows"][0]
    assert page.cells(row) == ["a", "3.00", "1.00", "1000", "4 bf16"]


def test_a_row_that_runs_out_of_memory_shows_how_much_is_missing_and_its_largest_arrays():
    arrays = (
        buffer_of(path="args[1].inner[0].mu['gate']['kernel']"),
        buffer_of(path="args[1].inner[0].mu['up']['kernel']", shape=(3, 2)),
        buffer_of(path="args[0]['up']['kernel']", bytes=GIB // 2),
        buffer_of(kind="temporary", path="net/up", operation="dot_general", source="net.py:3"),
        buffer_of(kind="temporary"),
    )
    exhausted = cost("a", memory=6 * 2**30, is_exhausted=True, buffers=arrays)
    (row,) = record(estimate_of(exhausted), COUNTS)["rows"]
    assert page.cells(row)[:3] == ["a", "6.00", "**-2.00**"]
    (text,) = page.buffers([row])
    assert text.splitlines() == [
        "The largest arrays under a:",
        "",
        "- 2 of 1.00 GiB, float32[2,3] and float32[3,2]: arguments `args[1].inner[0].mu`",
        "- 0.50 GiB, float32[2,3]: argument `args[0]`",
        "- 1.00 GiB, float32[2,3]: temporary `net/up`, `dot_general`, `net.py:3`",
        "- 1.00 GiB, float32[2,3]: temporary unknown",
    ]


def test_a_command_is_wrapped_and_stays_the_same_words():
    for table in tables():
        typed = page.command(table.command)
        assert max(map(len, typed.splitlines())) <= page.WIDTH
        assert shlex.split(typed.removeprefix("$").replace("\\\n", "")) == table.command


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
