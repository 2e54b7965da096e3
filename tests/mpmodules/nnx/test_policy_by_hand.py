"""A built nnx module's policy can't be set by hand: its layers would keep theirs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from mpmodules import nnx
from policy import get_policy, use_policy

X = jnp.ones((2, 4))


class Net(nnx.Module):
    def __init__(self, rngs: Any):
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(x)


@pytest.mark.parametrize("given", ["bf16", get_policy("mixed_float16"), None])
@pytest.mark.parametrize("built_under", [None, "mixed_bfloat16"])
def test_it_is_refused_at_a_model_and_at_a_layer_which_stay_as_they_were(built_under, given):
    with use_policy(built_under):
        model = Net(nnx.Rngs(0))
    before = model.dtype_policy
    for module in (model, model.head):
        with pytest.raises(ValueError, match=r"by hand.*nnx\.apply_policy\(model, '?(None|\w)"):
            module.dtype_policy = given
        assert module.dtype_policy == before
    model(X)


def test_a_part_that_is_built_keeps_its_policy_in_the_constructor_of_another():
    class Late(nnx.Module):
        def __init__(self, rngs: Any):
            self.net = Net(rngs)
            self.net.dtype_policy = None

    with pytest.raises(ValueError, match="by hand"):
        Late(nnx.Rngs(0), dtype_policy="bf16")


def test_a_copy_of_the_state_and_a_merge_hold_the_policy():
    model = Net(nnx.Rngs(0), dtype_policy="mixed_bfloat16")
    graph, state = nnx.split(model)
    nnx.update(model, state)
    assert nnx.merge(graph, state).dtype_policy == nnx.clone(model).dtype_policy
    assert nnx.clone(model).head.dtype_policy == get_policy("mixed_bfloat16")
