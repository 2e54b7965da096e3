"""Tables of estimates: the train steps as shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.estimates import decoder_8b
from benchmarks.estimates.tables import MODELS, Choice, Model
from benchmarks.estimates.training import counts_of
from policy import estimate, use_policy

CASES = [(model, choice) for model in MODELS for choice in model.choices]
PARAMS = {
    "language_model": 49_653_040,
    "resnet": 25_557_032,  # torchvision's resnet50 has as many
    "smollm2": 134_515_008,
    "decoder_8b": 8_030_261_248,
}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(("model", "choice"), CASES)
def test_a_step_of_small_sizes_returns_params_and_state_as_it_takes_them(
    model: Model, choice: Choice
):
    module = model.loaded()
    with use_policy(choice.policy):
        step, args = module.example(**dict(choice.options), **module.QUICK)
        *returned, _ = jax.eval_shape(step, *args)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), args[:3])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tuple(returned)) == like
    stored_in = jnp.bfloat16 if choice.policy == "bfloat16" else jnp.float32
    assert {x.dtype for x in jax.tree.leaves(args[0])} == {jnp.dtype(stored_in)}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.module)
def test_a_model_has_as_many_params_as_its_original(model: Model):
    _, args = model.loaded().example()
    assert counts_of(args)["params"] == PARAMS[model.module]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(args))


@pytest.mark.slow
def test_the_decoder_is_searched_over_batches_and_checkpoint_policies():
    size = dataclasses.replace(decoder_8b.QUICK["size"], length=64)
    example = functools.partial(decoder_8b.example, size=size)
    remats = ["full", "dots_with_no_batch_dims_saveable"]
    searched = {"batch": [2, 8], "remat": remats, "policies": ["mixed_bfloat16"]}
    found = estimate(example, on="cpu", **searched)
    names = [f"batch={batch}, remat={remat}" for batch in (2, 8) for remat in remats]
    assert [row.name for row in found.rows] == names
    for row in found.rows:
        by_hand = (row.batch or 0) * decoder_8b.flops_by_hand(size)
        assert row.model_flops <= 1.01 * by_hand
        repeated = sum(row.matmul_flops.values()) / row.model_flops
        assert repeated > 1.1 if row.remat == "full" else repeated < 1.02
    assert found[names[2]].model_flops == pytest.approx(4 * found[names[0]].model_flops, rel=0.01)
    assert found[names[2]].temporaries > found[names[0]].temporaries
