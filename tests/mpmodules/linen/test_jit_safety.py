"""Inner jits of linen, programs compiled ahead of time, and policies of the model's own."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import use_policy
from tests.programs import apply, named, operations

A, B = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
ABA = ((A, "bfloat16"), (B, "float16"), (A, "bfloat16"))
X = jnp.ones((2, 3))
KEY = jax.random.key(0)


@pytest.mark.parametrize("kind", ["nn.jit class", "nn.jit method", "jit of a block"])
def test_an_inner_jit_follows_the_scope(kind):
    class Block(nn.Module):
        def body(self, x):
            return nn.Dense(3)(x) * 2

        @nn.compact
        def __call__(self, x):
            return nn.jit(Block.body)(self, x) if kind == "nn.jit method" else self.body(x)

    cls = nn.jit(Block) if kind == "nn.jit class" else Block

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return cls()(cls()(x))

    model = Net()
    variables = model.init(KEY, X)
    run: Any = functools.partial(apply, model)
    run = jax.jit(run) if kind == "jit of a block" else run
    for policy, expected in ABA:
        with use_policy(policy):
            assert run(variables, X).dtype == expected
            ops = named(operations(run, variables, X), "dot_general", "mul")
        assert {op.inputs[0] for op in ops} == {expected}


def test_apply_policy_is_not_stale_under_nn_jit():
    """Flax's interceptors are no part of its jit key; the scope that is entered with ours is."""
    model = flax_nn.Sequential([flax_nn.jit(flax_nn.Dense)(3)])
    variables = model.init(KEY, X)
    for policy, expected in ABA:
        assert apply(nn.apply_policy(model, policy), variables, X).dtype == expected


def test_a_policy_of_the_modules_own_is_the_same_under_every_scope():
    model = nn.Sequential([nn.Dense(3)], dtype_policy=A)
    variables = model.init(KEY, X)
    for policy in (None, A, B):
        with use_policy(policy):
            assert apply(model, variables, X).dtype == "bfloat16"


def test_a_step_compiled_ahead_of_time_keeps_the_policy_it_was_lowered_under():
    model = nn.Dense(3)
    variables = model.init(KEY, X)
    with use_policy(A):
        compiled = jax.jit(model.apply).lower(variables, X).compile()
    assert compiled(variables, X).dtype == "bfloat16"
