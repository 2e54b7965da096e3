"""Ports whose own code multiplies run it under autocast, and layers as layers."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from policy import audit, autocast, compare
from policy.testing import assert_same_program
from tests.mpmodules import own_code_models as models
from tests.mpmodules.own_code_models import error
from tests.mpmodules.wings import BOTH, MIXED, Pair, Text, dense, layer_norm, weight
from tests.programs import assert_same_operations

TOKENS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))
RNGS = flax_nnx.Rngs
NET = Pair(models.Net, lambda: models.NnxNet(RNGS(0)))
BLOCK = Pair(models.Block, lambda: models.NnxBlock(RNGS(0)))
PROJECTION = Text(lambda self, x: jnp.dot(x, jnp.asarray(self.w)), "Projection", w=weight(16, 16))
LAYERS = Text(
    lambda self, x: self.last(jax.nn.relu(self.norm(self.first(x)))),
    first=dense(16, 8),
    norm=layer_norm(8),
    last=dense(8, 4),
)


def loss_of(model: Any, x: jax.Array) -> Any:
    def loss(params):
        (out, *_) = jax.tree.leaves(model.pure(params, x))
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    return loss


def share(model: Any, x: jax.Array = X, **kwargs: Any) -> float:
    """Returns the share of float32 matmuls, forward and backward."""
    return model.audit(x, backward=True, **kwargs).f32_matmul_share


@BOTH
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_nothing_is_left_in_float32_and_errors_are_those_of_autocast(wing, policy):
    half, wide = wing.port(NET, policy, None, TOKENS), wing.theirs(NET, TOKENS)
    truth = loss_of(wide, TOKENS)
    found = half.audit(TOKENS, backward=True)
    assert found.f32_matmul_share == 0 and not found.findings
    assert not [path for path in found.paths if "policy_" in path]
    assert {"block/qkv", "block/norm"} <= set(found.paths)

    gradient = jax.jit(jax.grad(truth))(wide.params)
    ours = jax.jit(jax.grad(loss_of(half, TOKENS)))(half.params)
    alone = jax.jit(jax.grad(autocast(truth, policy, params=0)))(wide.params)
    assert 0 < error(ours, gradient) <= 1.1 * error(alone, gradient)
    out, expected = (jax.jit(model.pure)(model.params, TOKENS) for model in (half, wide))
    assert out.dtype == jnp.float32 and error(out, expected) < 0.05


@BOTH
def test_compare_names_no_marks(wing):
    model = wing.port(NET, MIXED, None, TOKENS)
    found = compare(lambda params: model.pure(params, TOKENS), model.params)
    assert found.rows and "policy_" not in str(found)


@BOTH
def test_own_code_runs_under_autocast_unless_it_is_kept_and_nothing_warns(wing):
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("error")
        shares = {
            name: share(wing.port(PROJECTION, MIXED, None, X, own_code=name))
            for name in (None, "autocast", "keep")
        }
    assert shares == {None: 0, "autocast": 0, "keep": 1}


@BOTH
def test_values_and_options_that_contradict_are_refused(wing):
    with pytest.raises(
        ValueError, match="own_code should be 'autocast', 'keep' or None, but got 'auto'"
    ):
        wing.port(LAYERS, MIXED, own_code="auto")
    refused = "whatever the code names: leave out keep_explicit=True, or pass own_code='keep'"
    with pytest.raises(ValueError, match=refused):
        wing.port(LAYERS, MIXED, own_code="autocast", keep_explicit=True)


@BOTH
def test_a_model_whose_layers_multiply_is_the_program_that_it_was(wing):
    ours, kept = (wing.port(LAYERS, MIXED, None, X, own_code=own) for own in (None, "keep"))
    assert_same_operations(ours.pure, kept.pure, ours.params, X, others=(kept.params, X))
    ours, kept = (wing.port(NET, "float32", None, TOKENS, own_code=own) for own in (None, "keep"))
    assert_same_program(ours.pure, kept.pure, (ours.params, TOKENS))


@BOTH
def test_rules_hold_for_own_code_and_for_layers_and_another_method_runs_under_autocast_too(wing):
    model = wing.port(NET, MIXED, {"block/qkv": "float32", "head": "float32"}, TOKENS)
    found = model.audit(TOKENS, backward=True).operations
    dots = [op for op in found if op.primitive == "dot_general"]
    assert {op.path for op in dots if "float32" in op.operands} == {"block/qkv", "head"}
    assert share(wing.port(NET, MIXED, None, TOKENS), X, method="hidden") == 0


@BOTH
def test_state_and_random_streams_are_the_models_own(wing):
    net = Pair(lambda: models.Net(train=True), NET.nnx_model)
    half, wide = wing.port(net, MIXED, None, TOKENS), wing.theirs(net, TOKENS)
    assert error(half(TOKENS), wide(TOKENS)) < 0.05  # another dropout mask would give 0.5
    assert error(half.state, wide.state) < 0.01
    assert {leaf.dtype for leaf in jax.tree.leaves(half.state)} == {jnp.dtype("float32")}


@BOTH
def test_eager_derivatives_and_vmap(wing):
    model = wing.port(BLOCK, MIXED, None, X)
    gradients = [wrap(jax.grad(model.total(X)))(model.params) for wrap in (lambda f: f, jax.jit)]
    assert error(*gradients) < 0.01
    model = wing.port(PROJECTION, MIXED, None, X)
    rows = jax.vmap(lambda x: model.pure(model.params, x[None])[0])(X)
    assert error(rows, model(X)) < 0.01


@BOTH
def test_half_and_float64_parameters_and_inputs_are_taken_as_they_come(wing):
    model = wing.port(NET, "bfloat16", None, TOKENS)
    gradients = jax.eval_shape(jax.grad(model.total(TOKENS)), model.params)
    for tree in (model.params, gradients):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree)} == {"bfloat16"}
    assert set(model.made().values()) == {"bfloat16"}
    assert jax.eval_shape(model.pure, model.params, TOKENS).dtype == jnp.bfloat16
    assert share(model, TOKENS) == 0
    block = wing.port(BLOCK, MIXED, None, X)
    (out, *_) = jax.tree.leaves(jax.eval_shape(block.pure, block.params, X.astype(jnp.bfloat16)))
    assert out.dtype == jnp.float32
    with jax.enable_x64(True):
        model = wing.port(PROJECTION, MIXED, None, X)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model.params)
        found = audit(model.pure, wide, X.astype(jnp.float64))
    dots = [op for op in found.operations if op.primitive == "dot_general"]
    assert {op.operands for op in dots} == {("bfloat16", "bfloat16")}


# --- loops ----------------------------------------------------------------------------------------


class Carried:
    """A cell whose carry is one array."""

    @property
    def num_feature_axes(self):
        return 1


class Cell(Carried, flax_linen.RNNCellBase):
    """A cell that multiplies by itself."""

    @flax_linen.compact
    def __call__(self, carry, x):
        project = models.Projection
        carry = jnp.tanh(project(16, name="x")(x) + project(16, name="h")(carry))
        return carry, carry

    @flax_linen.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], 16))


class NnxCell(Carried, flax_nnx.RNNCellBase):
    """A cell that multiplies by itself, and calls a module that does."""

    def __init__(self):
        self.project = PROJECTION.nnx(flax_nnx, RNGS(0))
        self.h = flax_nnx.Param(jnp.eye(16))

    def __call__(self, carry, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        carry = jnp.tanh(self.project(inputs) + carry @ self.h[...])
        return carry, carry

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):  # pyright: ignore
        return jnp.zeros((*input_shape[:-1], 16))


def rnn() -> Any:
    return flax_linen.RNN(Cell())


def nnx_rnn() -> Any:
    return flax_nnx.RNN(NnxCell())


LOOPS = {
    "RNN": Pair(rnn, nnx_rnn),
    "Bidirectional": Pair(
        lambda: flax_linen.Bidirectional(rnn(), rnn()),
        lambda: flax_nnx.Bidirectional(nnx_rnn(), nnx_rnn()),
    ),
    "Sequential": Pair(
        lambda: flax_linen.Sequential([flax_linen.Dense(16), rnn()]),
        lambda: flax_nnx.Sequential(flax_nnx.Linear(16, 16, rngs=RNGS(0)), nnx_rnn()),
    ),
    "layers' cells": Pair(
        lambda: flax_linen.Sequential(
            [models.Projection(16), flax_linen.RNN(flax_linen.GRUCell(16))]
        ),
        lambda: flax_nnx.Sequential(
            PROJECTION.nnx(flax_nnx, RNGS(0)),
            flax_nnx.RNN(flax_nnx.GRUCell(16, 16, rngs=RNGS(0))),
        ),
    ),
}


@BOTH
@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_a_cell(wing, name):
    half, wide = wing.port(LOOPS[name], MIXED, None, X), wing.theirs(LOOPS[name], X)
    with jax.numpy_dtype_promotion("standard"):  # Flax's GRU
        assert share(half) == 0
        out, truth = (jax.jit(model.pure)(model.params, X) for model in (half, wide))
    assert out.dtype == jnp.float32 and error(out, truth) < 0.02


@BOTH
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize("first", [X[..., :3], X[:0]], ids=["fails", "empty"])
def test_a_call_that_fails_or_is_empty_decides_nothing_for_others(wing, first):
    own = Text(lambda self, x: self.layer(x) @ self.w, layer=dense(16, 16), w=weight(16, 16))
    model = wing.port(own, MIXED, None, X)
    if first.size:
        with pytest.raises(Exception, match=r"shape|incompatible|contracting"):
            model(first)
    else:
        model(first)
    assert share(model) == 0
