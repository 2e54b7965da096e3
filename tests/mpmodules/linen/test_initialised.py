"""A model that was initialised under a policy and is applied with none in force tells so, and no
other model does.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import DtypePolicyWarning, audit, compare, set_policy, use_policy

X = jnp.ones((2, 4))
TEXT = (
    r"^Net was initialised under 'params=float32,compute=bfloat16,.*', but is applied with no "
    r"policy in force, so "
)


class Net(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


def initialised(policy="mixed_bfloat16", **fields):
    model = Net(**fields)
    with use_policy(policy):
        return model, model.init(jax.random.key(0), X)


def test_apply_without_the_policy_of_init_warns_once_for_a_class():
    model, variables = initialised()
    other, _ = initialised(width=3)
    with pytest.warns(DtypePolicyWarning, match=TEXT) as told:
        model.apply(variables, X)
        model.apply(variables, X)
        jax.jit(model.apply)(variables, X)
        other.apply(variables, X)
    assert len(told) == 1


def test_a_traced_init_and_the_global_policy_count():
    for make in (jax.jit, lambda init: lambda *args: jax.eval_shape(init, *args)):
        model = Net()
        set_policy("mixed_bfloat16")
        make(model.init)(jax.random.key(0), X)
        variables = Net().init(jax.random.key(0), X)
        model.apply(variables, X)
        set_policy(None)
        text = r"If no policy is intended, call it inside use_policy\(None\)\."
        with pytest.warns(DtypePolicyWarning, match=text):
            model.apply(variables, X)


def test_a_block_around_the_call_is_an_answer_whatever_it_says():
    model, variables = initialised()
    for policy in (None, "float32", "mixed_bfloat16", "float16"):
        with use_policy(policy):
            model.apply(variables, X)
            jax.jit(lambda v, x: model.apply(v, x))(variables, X)


def test_models_that_no_policy_made_are_silent():
    _, variables = initialised()
    Net().apply(variables, X)  # another instance
    model, _ = initialised()
    model.init(jax.random.key(0), X)  # made again, without
    model.apply(variables, X)
    model, _ = initialised("float32")  # which computes as no policy does
    model.apply(variables, X)


def test_models_that_carry_their_policy_are_silent():
    own = Net(dtype_policy="mixed_bfloat16")
    ported = nn.apply_policy(Net(), "mixed_bfloat16")
    for model in (own, ported):
        with use_policy("float16"):
            variables = model.init(jax.random.key(0), X)
        assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32


def test_summaries_and_reports_are_silent():
    model, variables = initialised()
    with use_policy("mixed_bfloat16"):
        Net().tabulate(jax.random.key(0), X)
        audit(model.apply, variables, X)
    compare(model.apply, variables, X, policy="mixed_bfloat16")


def test_nothing_is_kept_of_a_model_that_is_gone():
    model, _ = initialised()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
