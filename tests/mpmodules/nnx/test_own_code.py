"""nnx ports whose own code multiplies run it under autocast, and layers as layers."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpmodules.nnx import Module, apply_policy
from policy import audit, autocast
from policy.testing import assert_same_program
from tests.mpmodules.own_code_models import NnxBlock, NnxNet, NnxProjection, error
from tests.programs import assert_same_operations

TOKENS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))
MIXED = "mixed_bfloat16"


def ported(model, policy=MIXED, rules=None):
    return apply_policy(model, policy, rules, own_code="autocast")


def loss(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def share(model, x=TOKENS):
    return audit(loss, model, x, backward=True).f32_matmul_share


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_nothing_is_left_in_float32_and_errors_are_those_of_autocast(policy):
    half, wide = ported(NnxNet(nnx.Rngs(0)), policy), NnxNet(nnx.Rngs(0))
    found = audit(loss, half, TOKENS, backward=True)
    assert found.f32_matmul_share == 0 and not found.findings
    assert not [path for path in found.paths if "policy_" in path] and "block/qkv" in found.paths

    truth = nnx.jit(nnx.grad(loss))(wide, TOKENS)
    ours = error(nnx.jit(nnx.grad(loss))(half, TOKENS), truth)
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)
    alone = jax.jit(
        jax.grad(
            autocast(lambda p: loss(nnx.merge(graph, p, rest, copy=True), TOKENS), policy, params=0)
        )
    )
    assert 0 < ours <= 1.1 * error(alone(params), truth)


def test_no_choice_warns_and_contradictions_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ported(NnxNet(nnx.Rngs(0)))(TOKENS)
        assert share(apply_policy(NnxNet(nnx.Rngs(0)), MIXED)) == 0
        keeps = apply_policy(NnxProjection(16, 4, nnx.Rngs(0)), MIXED, own_code="keep")
        with jax.numpy_dtype_promotion("standard"):
            assert share(keeps, X) == 1
    with pytest.raises(
        ValueError, match="own_code should be 'autocast', 'keep' or None, but got 'auto'"
    ):
        apply_policy(NnxNet(nnx.Rngs(0)), MIXED, own_code="auto")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="leave out dtype_fields=True"):
        apply_policy(NnxNet(nnx.Rngs(0)), MIXED, own_code="autocast", dtype_fields=True)


def test_a_model_whose_layers_multiply_is_the_program_that_it_was():
    def build(own_code: Any):
        layers = nnx.Sequential(
            nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1))
        )
        model = apply_policy(layers, MIXED, own_code=own_code)
        return lambda x: model(x)

    assert_same_operations(build(None), build("keep"), X)


def test_a_sequential_of_foreign_modules():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        NnxProjection(16, 8, rngs), nnx.Linear(8, 8, rngs=rngs), NnxProjection(8, 4, rngs)
    )
    assert share(ported(model), X) == 0


class Cell(nnx.RNNCellBase):
    """A cell that multiplies by itself."""

    def __init__(self, rngs):
        self.project = NnxProjection(16, 16, rngs)
        self.w = nnx.Param(jnp.eye(16))

    def __call__(self, carry, x):
        y = jnp.tanh(self.project(x) + carry @ self.w[...])
        return y, y


class Step(nnx.Module):
    def __init__(self, rngs):
        self.cell = Cell(rngs)

    def __call__(self, x):
        return self.cell(jnp.zeros_like(x), x)[1]


def test_a_cell_of_the_model_s_own_and_a_bidirectional_rnn_around_layers():
    assert share(ported(Step(nnx.Rngs(0))), X) == 0
    sweeps = [nnx.RNN(nnx.GRUCell(16, 4, rngs=nnx.Rngs(seed))) for seed in range(2)]
    model = nnx.Sequential(NnxProjection(16, 16, nnx.Rngs(2)), nnx.Bidirectional(*sweeps))
    with jax.numpy_dtype_promotion("standard"):
        assert audit(lambda m, x: m(x), ported(model), X).f32_matmul_share == 0


def test_state_is_updated_in_place_and_other_state_is_not_touched():
    half, wide = ported(NnxNet(nnx.Rngs(0))), NnxNet(nnx.Rngs(0))
    before = nnx.state(half, nnx.Param)
    out, truth = half(TOKENS), wide(TOKENS)
    assert error(out, truth) < 0.05  # another dropout mask would give 0.5
    mean, var = half.bn.mean[...], half.bn.var[...]
    assert (
        mean.dtype == jnp.float32
        and error((mean, var), (wide.bn.mean[...], wide.bn.var[...])) < 0.01
    )
    assert half.block.dropout.rngs is not None
    assert half.block.dropout.rngs.count[...] == wide.block.dropout.rngs.count[...] == 1  # pyright: ignore
    assert all(
        a is b
        for a, b in zip(
            jax.tree.leaves(before), jax.tree.leaves(nnx.state(half, nnx.Param)), strict=True
        )
    )


def test_derivatives_over_a_model_that_is_closed_over():
    model = ported(NnxProjection(16, 4, nnx.Rngs(0)))
    gradient = jax.grad(lambda x: jnp.sum(model(x)))(X)
    assert error(gradient, jnp.broadcast_to(model.w[...].sum(axis=1), X.shape)) < 0.01


def test_transformations_of_nnx():
    model = ported(NnxNet(nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    pure = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True), TOKENS)))
    assert error(pure(params), nnx.jit(nnx.grad(loss))(model, TOKENS)) < 0.01

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return NnxBlock(rngs)

    layers = ported(build(nnx.Rngs(0)))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    with jax.numpy_dtype_promotion("standard"):
        assert audit(run, layers, X).f32_matmul_share == 0


def test_rules_hold_for_own_code_and_for_layers():
    model = ported(NnxNet(nnx.Rngs(0)), rules={"block/qkv": "float32", "head": "float32"})
    found = audit(lambda m, x: m(x), model, TOKENS)
    wide = {
        op.path
        for op in found.operations
        if op.primitive == "dot_general" and "float32" in op.operands
    }
    assert wide == {"block/qkv", "head"}


def test_other_methods_and_parts_of_a_model():
    model = ported(NnxNet(nnx.Rngs(0)))
    assert audit(lambda m, x: m.hidden(x), model, X).f32_matmul_share == 0
    assert audit(lambda m, x: m(x), model.block, X).f32_matmul_share == 0


def test_copies_are_equal_and_run_alike():
    model, again = ported(NnxBlock(nnx.Rngs(0))), ported(NnxBlock(nnx.Rngs(0)))
    assert nnx.graphdef(model) == nnx.graphdef(again)
    assert nnx.graphdef(model) != nnx.graphdef(
        apply_policy(NnxBlock(nnx.Rngs(0)), MIXED, own_code="keep")
    )
    for other in (copy.deepcopy(model), nnx.clone(model), pickle.loads(pickle.dumps(model))):
        assert_same_program(lambda x, m=other: nnx.clone(m)(x), lambda x: nnx.clone(model)(x), (X,))


def test_half_parameters():
    model = ported(NnxNet(nnx.Rngs(0)), "bfloat16")
    gradients = nnx.eval_shape(nnx.grad(loss), model, TOKENS)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(gradients)} == {"bfloat16"}
    assert share(model) == 0 and model(TOKENS).dtype == jnp.bfloat16
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
        "bfloat16"
    }


class OwnCell(nnx.RNNCellBase):
    """A cell that multiplies by itself."""

    def __init__(self, rngs: nnx.Rngs):
        self.x, self.h = NnxProjection(16, 16, rngs), NnxProjection(16, 16, rngs)

    def __call__(self, carry, inputs):
        carry = jnp.tanh(jnp.dot(inputs, self.x.w[...]) + jnp.dot(carry, self.h.w[...]))
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        del rngs, carry_init
        return jnp.zeros((*input_shape[:-1], 16))

    @property
    def num_feature_axes(self):
        return 1


def test_loops_over_a_cell_of_the_models_own():
    def rnn():
        return nnx.RNN(OwnCell(nnx.Rngs(0)))

    loops = [
        rnn,
        lambda: nnx.Bidirectional(rnn(), rnn()),
        lambda: nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), rnn()),
    ]
    for loop in loops:
        model = ported(loop())
        assert share(model, X) == 0
        assert (
            error(nnx.jit(lambda m, x: m(x))(model, X), nnx.jit(lambda m, x: m(x))(loop(), X))
            < 0.01
        )


class Modes(nnx.Module):
    """Multiplies by hand where it is told to."""

    def __init__(self, rngs):
        self.layer, self.own = nnx.Linear(16, 16, rngs=rngs), NnxProjection(16, 16, rngs)

    def __call__(self, x, mode="layers"):
        y = self.layer(x)
        return self.own(y) if mode == "all" else y


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
def test_a_call_that_shows_nothing_fails_or_is_empty_decides_nothing():
    modes = apply_policy(Modes(nnx.Rngs(0)), MIXED)
    modes(X)
    assert audit(lambda m: m(X, mode="all"), modes).f32_matmul_share == 0
    for first in (X[..., :3], X[:0]):
        model = apply_policy(NnxBlock(nnx.Rngs(0)), MIXED)
        if first.size:
            with pytest.raises((TypeError, ValueError), match=r"shape|incompatible|contracting"):
                model(first)
        else:
            model(first)
        assert audit(lambda m: m(X), model).f32_matmul_share == 0


class Stateful(nnx.Module):
    """Changes all kinds of state in its calls."""

    def __init__(self, rngs):
        self.own, self.calls, self.mode = NnxProjection(16, 4, rngs), 0, "new"
        self.empty, self.none = nnx.Variable({}), nnx.Variable(None)
        self.pair, self.raw = nnx.Variable((jnp.zeros(2), jnp.zeros(3))), nnx.data(jnp.zeros(2))

    def __call__(self, x):
        first, second = self.pair.get_value()
        self.pair.set_value((first, second + 1))
        self.calls, self.mode, self.raw = self.calls + 1, "used", self.raw + 1
        return self.own(x)


def test_all_kinds_of_state_are_changed_as_a_plain_call_changes_them():
    half, wide = ported(Stateful(nnx.Rngs(0))), Stateful(nnx.Rngs(0))
    for model in (half, wide):
        for _ in range(2):
            model(X)
    assert (half.calls, half.mode) == (wide.calls, wide.mode) == (2, "used")
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(half)), jax.tree.leaves(nnx.state(wide)), strict=True
    ):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)
    assert half.pair.get_value()[1][0] == half.raw[0] == 2 and half.none.get_value() is None


def test_no_tracer_is_leaked():
    model = ported(NnxProjection(16, 4, nnx.Rngs(0)))
    with jax.checking_leaks():  # raises where a tracer outlives its trace
        out = model(X)
    assert error(out, jnp.dot(X, model.w[...])) < 0.01


def test_a_port_inside_of_a_module_of_ours():
    class Outer(Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    for outer in (
        Outer(ported(NnxBlock(nnx.Rngs(0)))),
        nnx.Sequential(ported(NnxBlock(nnx.Rngs(0)))),
    ):
        assert share(outer, X) == 0


def test_rows_are_added_up_in_float32():
    class Graph(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(
                4, 8, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)
            )

        def __call__(self, x):
            return jax.ops.segment_sum(self.dense(x), jnp.zeros(len(x), int), num_segments=2)

    x = jnp.ones((4096, 4))
    model = apply_policy(Graph(), MIXED)
    out = nnx.jit(lambda m, x: m(x))(model, x)
    assert out[0, 0] == 4096 * 4
