"""nnx's own ways to call, copy and differentiate a port whose own code multiplies."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from flax import nnx

from mpmodules.nnx import Module, apply_policy
from policy import audit
from tests.mpmodules.own_code_models import NnxBlock, NnxNet, NnxProjection, error

TOKENS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))
MIXED = "mixed_bfloat16"


def ported(model):
    return apply_policy(model, MIXED)


def loss(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def share(model, x=X):
    return audit(loss, model, x, backward=True).f32_matmul_share


def test_parts_of_a_model_and_ports_in_other_models():
    class Outer(Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x)

    rngs = nnx.Rngs(0)
    foreign = NnxProjection(16, 8, rngs), nnx.Linear(8, 8, rngs=rngs), NnxProjection(8, 4, rngs)
    for model in (
        ported(NnxNet(rngs)).block,
        ported(nnx.Sequential(*foreign)),
        Outer(ported(NnxBlock(rngs))),
        nnx.Sequential(ported(NnxBlock(rngs))),
    ):
        assert share(model) == 0


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
        model(X)
        nnx.jit(lambda model: model(X))(model)
    assert (half.calls, half.mode) == (wide.calls, wide.mode) == (2, "used")
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(half)), jax.tree.leaves(nnx.state(wide)), strict=True
    ):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)
    assert half.pair.get_value()[1][0] == half.raw[0] == 2 and half.none.get_value() is None


def test_no_tracer_is_leaked_no_parameter_touched_and_a_closed_over_model_differentiated():
    model = ported(NnxProjection(16, 4, nnx.Rngs(0)))
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    with jax.checking_leaks():  # raises where a tracer outlives its trace
        out = model(X)
    assert error(out, jnp.dot(X, model.w[...])) < 0.01
    assert all(map(operator.is_, before, jax.tree.leaves(nnx.state(model, nnx.Param))))
    gradient = jax.grad(lambda x: jnp.sum(model(x)))(X)
    assert error(gradient, jnp.broadcast_to(model.w[...].sum(axis=1), X.shape)) < 0.01
