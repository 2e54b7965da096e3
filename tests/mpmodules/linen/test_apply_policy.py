"""Policies for linen models that know nothing of us: their text stays as it is."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from mpmodules import linen as our_nn
from policy import current_policy, use_policy
from tests.programs import named, operations

apply_policy = our_nn.apply_policy
KEY = jax.random.key(0)
X = jnp.ones((2, 3, 4))
MIXED = "mixed_bfloat16"


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.LayerNorm()(nn.Dense(4)(x))))


class Setup(nn.Module):
    def setup(self):
        self.blocks = [Compact(), Compact()]
        self.norm = nn.BatchNorm(use_running_average=True)
        self.conv = nn.Conv(4, (3,))

    def __call__(self, x):
        for block in self.blocks:
            x = self.conv(self.norm(block(x)))
        return x

    def first(self, x):
        return self.blocks[0](x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(x))


def test_the_initial_values_stay():
    plain, ported = (jax.jit(m.init)(KEY, X) for m in (Setup(), apply_policy(Setup(), MIXED)))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, ported))


def test_bind_works_and_a_submodule_taken_out_is_not_covered():
    ported = apply_policy(Setup(), MIXED)
    variables = ported.init(KEY, X)
    bound = ported.bind(variables)
    assert bound(X).dtype == jnp.float32
    (dot, *_) = named(operations(bound.first, X), "dot_general")
    assert dot.inputs == ("bfloat16", "bfloat16")
    (dot, *_) = named(operations(ported.bind(variables).blocks[0], X), "dot_general")
    assert dot.inputs == ("float32", "float32")


def test_tabulate_capture_and_interceptors_see_what_they_saw():
    def captured(model):
        _, state = model.apply(model.init(KEY, X), X, capture_intermediates=True)
        return jax.tree.structure(state["intermediates"])

    def calls_of(model):
        calls = []

        def note(next_fun, args, kwargs, context):
            if context.method_name != "setup":  # which runs before the call is traced, and in it
                name = type(context.module).__name__
                calls.append((name, context.method_name, context.module.path))
            return next_fun(*args, **kwargs)

        variables = model.init(KEY, X)
        with nn.intercept_methods(note):
            model.apply(variables, X)
        return calls

    for model in (Compact(), Setup(), Attention()):
        ported = apply_policy(model, MIXED)
        assert captured(ported) == captured(model)
        assert calls_of(ported) == calls_of(model)
    ported = apply_policy(Compact(), MIXED).tabulate(KEY, X, policy_columns=False)
    plain = Compact().tabulate(KEY, X)
    assert plain.count("Dense_0") == ported.count("Dense_0")


def test_a_ported_model_ignores_the_scope_around_it_and_leaves_none_behind():
    ported = apply_policy(Compact(), MIXED)
    with use_policy("f16"):
        ops = operations(ported.apply, jax.eval_shape(ported.init, KEY, X), X)
    assert {op.inputs[0] for op in named(ops, "dot_general")} == {"bfloat16"}
    assert current_policy() is None


def test_a_function_that_flax_offers_sums_in_float32_unless_own_code_is_kept():
    class Pools(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.avg_pool(nn.Dense(3)(x), (2,))

    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(Pools().init, KEY, X)
    for ported, dtype in (
        (apply_policy(Pools(), MIXED), "float32"),
        (apply_policy(Pools(), MIXED, own_code="keep"), "bfloat16"),
    ):
        with jax.numpy_dtype_promotion("standard"):  # Flax's avg_pool divides a half by an integer
            ops = operations(ported.apply, variables, X)
        assert named(ops, "reduce_window_sum")[0].inputs == (dtype,)
