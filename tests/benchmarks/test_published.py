"""Published runs beside estimates: figures, sizes, and the steps as shapes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from benchmarks.accel.scale_model import Size
from benchmarks.estimates.published import decoder, results, runs, table
from benchmarks.estimates.published.__main__ import main
from benchmarks.estimates.published.decoder import FULL, MINIMAL, Remat
from benchmarks.estimates.published.runs import RUNS, Figure, maxtext_flops, published_seconds
from benchmarks.estimates.training import counts_of
from mpmodules import use_policy

SMALL = Size(2, 32, 4, 2, 8, 48, 64, 16)
# Of the checkpoints' own pages; of MaxText's scaled models what its README calls 16B, 32B and 64B.
PARAMS = {
    runs.LLAMA2_7B: 6_738_415_616,
    runs.LLAMA2_70B: 68_976_648_192,
    runs.LLAMA3_8B: 8_030_261_248,
    runs.LLAMA3_70B: 70_553_706_496,
    runs.MISTRAL_7B: 7_241_732_096,
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("size", PARAMS, ids=lambda size: f"{size.layers} x {size.width}")
def test_a_published_model_has_as_many_params_as_its_checkpoint(size: Size):
    _, args = decoder.step_of(size, 1, FULL)
    assert counts_of(args)["params"] == PARAMS[size]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(args))


def test_flops_are_those_of_maxtexts_logs():
    # "seconds: 3.443, TFLOP/s/device: 413.433, Tokens/s/device: 7138.890" for three texts
    # (tpu-recipes, training/trillium/Llama3.1-8B-MaxText/v6e-8)
    assert maxtext_flops(runs.LLAMA3_8B, 3) / 413.433e12 == pytest.approx(3.443, rel=1e-3)
    # "seconds: 18.688, TFLOP/s/device: 422.091" for two (Llama3.1-70B-MaxText/v6e-64)
    assert maxtext_flops(runs.LLAMA3_70B, 2) / 422.091e12 == pytest.approx(18.688, rel=1e-3)


@pytest.mark.parametrize(
    ("figure", "seconds"),
    [
        (Figure(2.5), 2.5),
        (Figure(64.0, "tokens/s"), 0.75),  # 3 texts of 16 tokens on a device
        (Figure(1.8e3, "hours", 6_480_000), 1.0),
    ],
)
def test_a_figure_becomes_seconds(figure: Figure, seconds: float):
    run = dataclasses.replace(RUNS[0], size=SMALL, batch=3, figure=figure)
    assert published_seconds(run) == pytest.approx(seconds)


def test_images_are_those_of_all_devices():
    run = runs.run_of("vit-b16-h100-8")
    assert published_seconds(run) == pytest.approx(4096 / 11669.52)


def test_each_run_has_a_name_a_source_and_a_mesh_of_its_devices():
    assert len({run.name for run in RUNS}) == len(RUNS) >= 10
    for run in RUNS:
        assert run.url.startswith("https://") and run.left_out
        assert math.prod(run.mesh.values()) == run.devices
        assert (run.size is None) != (run.make is None)


def test_params_are_split_along_the_width_and_the_other_side():
    size, both = SMALL, ("fsdp", "tensor")
    shapes = {
        (64, 32): PartitionSpec("tensor", "fsdp"),
        (32, 64): PartitionSpec("fsdp", "tensor"),
        (2, 32, 4, 8): PartitionSpec(None, "fsdp", "tensor", None),
        (2, 4, 8, 32): PartitionSpec(None, "tensor", None, "fsdp"),
        (2, 32, 48): PartitionSpec(None, "fsdp", "tensor"),
        (2, 48, 32): PartitionSpec(None, "tensor", "fsdp"),
        (2, 32): PartitionSpec(),
        (32,): PartitionSpec(),
    }
    assert {shape: decoder.param_spec(shape, size, both) for shape in shapes} == shapes
    assert decoder.param_spec((2, 32, 48), size, ("fsdp",)) == PartitionSpec(None, "fsdp", None)
    _, args = decoder.step_of(size, 1, FULL)
    assert {x.shape for x in jax.tree.leaves(args[0])} == set(shapes) | {(2, 32, 2, 8)}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_a_step_returns_params_and_state_as_it_takes_them(policy: str):
    with use_policy(policy):
        step, args = decoder.step_of(SMALL, 2, MINIMAL)
        *returned, _ = jax.eval_shape(step, *args)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), args[:3])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tuple(returned)) == like


def by_hand(params, tokens):
    """The loss of the decoder, from logits."""
    model = decoder.Decoder(SMALL, FULL)
    _, state = model.apply(
        {"params": params}, tokens, capture_intermediates=lambda module, _: module.name == "norm"
    )
    x = state["intermediates"]["norm"]["__call__"][0][:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:])
    return losses.mean()


@pytest.mark.slow
def test_the_loss_is_that_of_logits_and_no_remat_changes_its_gradients():
    tokens = jax.random.randint(jax.random.key(1), (3, SMALL.length), 0, SMALL.vocabulary)
    with use_policy("float32"), jax.default_matmul_precision("float32"):
        params = decoder.Decoder(SMALL, FULL).init(jax.random.key(0), tokens)["params"]

        def value_and_grad(remat: Remat):
            model = decoder.Decoder(SMALL, remat)
            return jax.value_and_grad(lambda params: model.apply({"params": params}, tokens))(
                params
            )

        loss, grads = value_and_grad(FULL)
        np.testing.assert_allclose(loss, by_hand(params, tokens), rtol=1e-6)
        for remat in (MINIMAL, Remat(saved=(*MINIMAL.saved, "attention"))):
            _, others = value_and_grad(remat)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), grads, others)


@pytest.mark.slow
def test_saved_values_leave_fewer_matmuls_to_backward():
    tokens = jnp.zeros((1, SMALL.length), int)

    def flops(remat: Remat) -> float:
        model = decoder.Decoder(SMALL, remat)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        loss = jax.grad(lambda params: model.apply({"params": params}, tokens))
        return str(jax.make_jaxpr(loss)(params)).count("dot_general")

    assert flops(MINIMAL) < flops(Remat(saved=("query", "key", "value"))) < flops(FULL)


def test_the_command_prints_stored_rows_and_rejects_unknown_ones(capsys):
    assert main(["--stored"]) == 0
    assert "ViT-B/16" in capsys.readouterr().out
    assert main(["--only", "gpt5"]) == 2
    assert "There is no run 'gpt5'" in capsys.readouterr().err


def test_the_section_has_every_run_that_is_stored():
    stored = [run for run in RUNS if results.stored(run) is not None]
    found = table.section()
    assert found.count("\n| ") == 2 * len(stored) + 3  # a head, and two lines
    assert found.count("](https://") == len(stored) > 5
