"""Every model of the suite pairs with itself in float32, forward and backward: nothing is compared
with less.
"""

import jax.numpy as jnp
import pytest

from policy import get_policy
from policy.inspect.traced.call import Call, Program, program_of
from tests.policy.autocasting.models import MODELS, Model


def paired(model: Model, policy: str, loss_scale: float | None) -> Program:
    def loss(params, x):
        return jnp.sum(jnp.abs(model.fn(params, x)).astype(jnp.float32))

    call = Call.of(
        "compare",
        model.fn if loss_scale is None else loss,
        (model.params, model.x),
        {},
        None,
        loss_scale,
    )
    return program_of(call, get_policy(policy))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_autocast_pairs_with_its_float32_trace(name):
    for policy, loss_scale in (("mixed_float16", None), ("mixed_bfloat16", 1.0)):
        program = paired(MODELS[name], policy, loss_scale)
        assert program.refused == ""
        assert program.reference is not None
        assert program.reference.unpaired == {}
        assert bool(program.gradients) is (loss_scale is not None)
