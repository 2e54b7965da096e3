"""Tables of estimates: the train steps as shapes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.estimates.tables import MODELS, Choice, Model
from benchmarks.estimates.training import counts_of
from policy import use_policy

CASES = [(model, choice) for model in MODELS for choice in model.choices]
PARAMS = {
    "language_model": 49_653_040,
    "resnet": 25_557_032,  # torchvision's resnet50 has as many
    "smollm2": 134_515_008,
    "decoder_8b": 8_030_261_248,
}


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


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.module)
def test_a_model_has_as_many_params_as_its_original(model: Model):
    _, args = model.loaded().example()
    assert counts_of(args)["params"] == PARAMS[model.module]
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(args))
