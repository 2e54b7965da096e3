"""Searches of an estimate: batches, checkpoint policies and meshes beside policies; the front."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct
from jax.ad_checkpoint import checkpoint_name

import policy
from mpmodules import linen, nnx
from policy.inspect.estimate.costing import model_flops
from policy.inspect.estimate.rows import PolicyCost
from policy.inspect.estimate.search import (
    CHECKPOINT_POLICIES,
    remat_policy,
    rows_of_search,
    search_of,
)
from policy.inspect.estimate.steps import rows_of
from policy.inspect.estimate.targets import Target
from policy.inspect.estimate.text import estimate_text
from policy.programs.reading.graph import Graph
from tests.policy.inspect.estimate.estimates import GIB, cost, estimate_of, lacking, not_compiled

LAYERS, WIDTH = 3, 32
MATMULS = 2 * LAYERS * 2 * 8 * WIDTH * WIDTH  # FLOPs of forward for 8 examples


def example(batch=8, remat=None):
    """The gradient of scanned and rematerialized blocks of two matmuls."""

    def block(x, w):
        hidden = checkpoint_name(x @ w, "hidden")
        return x + jnp.tanh(jnp.tanh(hidden) @ w), None

    def loss(w, x):
        body = block if remat is None else jax.checkpoint(block, prevent_cse=False, policy=remat)
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    shapes = ((LAYERS, WIDTH, WIDTH), (batch, WIDTH))
    return jax.grad(loss, (0, 1)), tuple(ShapeDtypeStruct(one, jnp.float32) for one in shapes)


def estimate(fn: Any = example, *args: Any, **options: Any) -> Any:
    return policy.estimate(fn, *args, **({"policies": [None], "on": "cpu"} | options))


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


MESHES = ({"data": 8}, {"data": 4, "fsdp": 2})


def space(batch: Any = (), remat: Any = (), mesh: Any = ()) -> dict[str, Any]:
    return {"batch": batch, "remat": remat, "mesh": mesh}


@pytest.mark.parametrize(
    ("policies", "search", "names"),
    [
        (["f32", "bf16"], space(), ["float32", "bfloat16"]),
        (["f32"], space((8,), ("full",), MESHES[:1]), ["float32"]),
        (["f32"], space((8, 16)), ["batch=8", "batch=16"]),
        (["f32"], space((), ("full",), MESHES), ["data=8", "data=4 fsdp=2"]),
        (["f32", "bf16"], space((), ("full",), MESHES[:1]), ["float32", "bfloat16"]),
        (
            {"a": "f32", "b": ("bf16", {"rate": 3})},
            space((8, 16), ("none", "names:x,y")),
            [
                f"{name}, batch={batch}, remat={remat}"
                for name in "ab"
                for batch in (8, 16)
                for remat in ("none", "names:x,y")
            ],
        ),
    ],
)
def test_a_rows_name_has_what_differs(policies, search, names):
    assert [row.name for row in rows_of_search(rows_of(policies), search, 24)] == names


def test_a_row_has_one_value_of_each():
    search = space((8, 16), ("full",), MESHES)
    *_, row = rows_of_search(rows_of({"a": ("bf16", {"rate": 3})}), search, 24)
    nothing = jax.checkpoint_policies.nothing_saveable
    assert row.options == {"rate": 3, "batch": 16, "remat": nothing}
    assert (row.batch, row.remat, row.mesh) == (16, "full", MESHES[1])


def test_a_row_without_a_search_may_have_a_batch_among_its_options():
    [row] = rows_of_search(rows_of([("bf16", {"batch": 4})]), space(), 24)
    assert (row.name, row.batch, row.remat, row.mesh) == ("bfloat16, batch=4", 4, "", None)


@pytest.mark.parametrize("name", [*CHECKPOINT_POLICIES, "names:hidden", "names:hidden, other"])
def test_a_name_is_a_policy_of_checkpoints(name):
    grad = jax.grad(lambda x: jax.checkpoint(jnp.sin, policy=remat_policy(name))(x).sum())
    jax.eval_shape(grad, jnp.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch should be at least 1, but got 0"),
        ({"batch": []}, "batch has no values: leave it out, or give one"),
        ({"batch": [8, 8]}, "batch has 8 twice"),
        ({"batch": jnp.ones(3)}, r"given by functools.partial\(fn, batch=...\)"),
        ({"remat": "ful"}, "remat has no value 'ful'. Did you mean 'full'"),
        ({"remat": ["names:"]}, "remat has no value 'names:'"),
        ({"remat": [jax.checkpoint_policies.dots_saveable]}, r"options: \('bfloat16', {'remat'"),
        ({"mesh": [{"data": 3}, {"data": 1}]}, "A mesh of data=3 has 3 devices, but cpu has 1"),
        ({"mesh": [[("data", 1)]]}, "mesh should be a dict of axes and their sizes"),
        ({"policies": [("f32", {"batch": 8})], "batch": 8}, "has the option 'batch', and batch="),
        (
            {"batch": list(range(1, 9)), "remat": ["full", "none"], "policies": ["f32", "bf16"]},
            r"compiles 32 programs \(2 policies x 8 batches x 2 remats\), more than max_compiles="
            "24: give fewer values, or max_compiles=32",
        ),
    ],
)
def test_a_search_that_makes_no_sense_is_rejected_before_anything_is_traced(options, message):
    def traced(batch=8, remat=None):
        raise AssertionError

    with pytest.raises((TypeError, ValueError), match=message):
        estimate(traced, **options)


def test_an_option_that_nothing_takes_is_rejected_by_name():
    with pytest.raises(ValueError, match=r"no parameter 'remat', .* Parameters: batch."):

        def lacking(batch=8):
            raise AssertionError

        estimate(lacking, remat="full", batch=8)
    x = ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(ValueError, match=r"batch go to an example as keyword arguments: give est"):
        estimate(jnp.sin, x, batch=[8, 16])
    assert estimate(lambda **given: example(**given), batch=4).rows[0].batch == 4


def test_a_name_that_no_value_has_is_rejected():
    with pytest.raises(ValueError, match=r"names 'hiden'. Names: hidden."):
        estimate(remat="names:hidden,hiden")


def test_more_programs_are_compiled_where_that_is_asked_for():
    search, rows = space(tuple(range(1, 31))), rows_of(["f32"])
    assert len(rows_of_search(rows, search, 30)) == 30
    many = rows_of({str(i): "f32" for i in range(30)})  # named one by one
    assert len(rows_of_search(many, space(), 24)) == 30


# --------------------------------------------------------------------------------------------------
# Costs
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_row_is_compiled_with_its_batch_and_its_checkpoint_policy():
    found = estimate(batch=[8, 16], remat=["full", "names:hidden", "dots_saveable", "none"])
    repeated = {"full": 1, "names:hidden": 1 / 2}  # of forward
    for row in found.rows:
        assert row.name == f"batch={row.batch}, remat={row.remat}"
        size = row.batch / 8 * MATMULS
        assert row.model_flops == 3 * size
        assert sum(row.matmul_flops.values()) == (3 + repeated.get(row.remat, 0)) * size
    assert found["batch=8, remat=none"].arguments == 4 * (3 * 32 * 32 + 8 * 32)


def test_each_mesh_has_its_row():
    meshes = [{"data": 1}, {"data": 1, "fsdp": 1}]
    seen: list[dict[str, int]] = []

    def sharded(mesh):
        seen.append(dict(mesh.shape))
        return example()

    assert [row.name for row in estimate(sharded, mesh=meshes).rows] == ["data=1", "data=1 fsdp=1"]
    assert seen == meshes


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        block = linen.remat(linen.Dense)
        return linen.Dense(8)(block(64)(jnp.tanh(block(64)(x))))


def counted(function: Any, *shapes: tuple[int, ...]) -> float:
    given = [ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return model_flops(Graph(jax.make_jaxpr(function)(*given)))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["float32", "mixed_bfloat16"])
def test_model_flops_leave_out_what_layers_repeat(text):
    x = ShapeDtypeStruct((16, 32), jnp.float32)
    with policy.use_policy(text):
        params = jax.eval_shape(Net().init, jax.random.key(0), x)
        apply: Any = Net().apply
        loss = lambda params, x: jnp.sum(apply(params, x).astype(jnp.float32))  # noqa: E731
        found = model_flops(Graph(jax.make_jaxpr(jax.value_and_grad(loss))(params, x)))
    assert found == 2 * 16 * (3 * (64 * 64 + 64 * 8) + 2 * 32 * 64)  # x has no gradient


@pytest.mark.parametrize("is_repeated", [False, True])
def test_attention_in_one_kernel_counts_all_pairs_forward_and_twice_backward(is_repeated):
    def attend(*operands):
        return nnx.dot_product_attention(*operands, is_causal=True, implementation="splash")

    run = jax.checkpoint(attend) if is_repeated else attend
    shape, pairs = (2, 256, 4, 128), 2 * 4 * 256 * 256
    grad = jax.value_and_grad(
        lambda *operands: jnp.sum(run(*operands).astype(jnp.float32)), (0, 1, 2)
    )
    assert counted(attend, *[shape] * 3) == 2 * 2 * pairs * 128
    assert counted(grad, *[shape] * 3) == 3 * 2 * 2 * pairs * 128
    x = ShapeDtypeStruct(shape, jnp.bfloat16)
    assert set(policy.audit(grad, x, x, x).matmul_flops_by_dtype) == {"bfloat16"}


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


def at(seconds: float, memory: int, **changes: Any) -> PolicyCost:
    """Returns a row of some seconds and some GiB."""
    name = changes.pop("name", f"{seconds} s, {memory} GiB")
    given = {"compute_seconds": seconds, "collectives": (), "memory": memory * GIB}
    return cost(name, **{**given, **changes})


def test_the_front_has_what_no_row_beats_in_both_figures():
    rows = [at(3, 5), at(1, 9), at(2, 9), at(2, 7), at(2, 6), at(4, 5), at(0.5, 20), not_compiled()]
    found = estimate_of(*rows)
    assert [row.name for row in found.front] == ["1 s, 9 GiB", "2 s, 6 GiB", "3 s, 5 GiB"]
    twice = estimate_of(at(1, 5), at(1, 5, name="alike"), at(2, 5))
    assert [row.name for row in twice.front] == ["1 s, 5 GiB", "alike"]
    assert estimate_of(cost(compute_seconds=None)).front == ()


def test_rows_of_several_batches_compare_by_example():
    found = estimate_of(at(1, 5, batch=4, name="small"), at(2, 5, batch=16, name="large"))
    assert [row.seconds_per_example for row in found.rows] == [0.25, 0.125]
    assert [row.name for row in found.front] == ["large"]
    unknown = estimate_of(found.rows[0], at(0.5, 5))
    assert not unknown.compares_examples and [row.name for row in unknown.front] == ["0.5 s, 5 GiB"]


def test_mfu_is_of_all_devices_at_their_peak_in_half_precision():
    row = at(2.0, 5, model_flops=8e15, peak=2e14, devices=16)
    assert row.mfu == 8e15 / (2.0 * 16 * 2e14)
    unknown = (cost(), cost(peak=1e14), cost(model_flops=1e9))
    assert [row.mfu for row in unknown] == [None] * 3


FOUND = estimate_of(
    at(1.0, 5, batch=8, remat="full", name="batch=8", model_flops=1e15, peak=2e14, devices=16),
    at(1.5, 7, batch=16, remat="full", name="batch=16", model_flops=2e15, peak=2e14, devices=16),
    at(2.0, 9, batch=16, remat="full", name="slow", uncounted=("sorts",), peak=2e14, devices=16),
    lacking("large", batch=32, remat="full"),
)


def test_the_text_of_a_search_marks_the_front_and_has_time_by_example_and_mfu():
    text = estimate_text(FOUND)
    assert text.startswith("estimate of train.py:example: 3 of 4 rows fit")
    assert "  remat     full\n" in text and "  front     * no row that fits takes less" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for part in (
        "row fits front memory",
        "batch=8 fits, 11 GiB spare * 5 GiB",
        "slow fits, 7 GiB spare 9 GiB",
        "1 s 125 ms 31.2%",
        "1.5 s 93.8 ms x0.75 41.7%",
        "≥ 2 s ≥ 125 ms",
    ):
        assert any(part in line for line in lines), part
    assert "largest buffers" not in text  # of a row that lacks memory: on the page
    assert "front" not in estimate_text(estimate_of(cost(), cost("other")))


def test_the_json_of_a_search_has_its_front_and_options():
    read = json.loads(FOUND.to_json())
    assert read["front"] == ["batch=16", "batch=8"]
    row = read["rows"][1]
    assert (row["batch"], row["remat"], row["mesh"]) == (16, "full", {})
    assert (row["seconds_per_example"], row["mfu"]) == (1.5 / 16, 2e15 / (1.5 * 16 * 2e14))


def test_the_values_of_a_call_become_those_of_a_search():
    target = Target("cpu")
    assert search_of(None, None, None, target) == space()
    assert search_of(8, "full", {"data": 1}, target) == space((8,), ("full",), ({"data": 1},))
    assert search_of([8, 4], ("none",), None, target) == space((8, 4), ("none",))
