"""Lifted linen classes, and variables that linen's code makes, under the rule for a user's code."""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from tests.mpmodules.wings import KEY, MIXED, NORMAL, X
from tests.programs import apply, named, operations

HALF = ("bfloat16", "bfloat16")


def block(nn: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            w, b = self.param("w", NORMAL, (4, 4)), self.param("b", NORMAL, (4,))
            return nn.Dense(4)(nn.LayerNorm()(x) @ w + jnp.broadcast_to(b, x.shape)), None

        def twice(self, x):
            return self(self(x)[0])[0]

    return Block


LIFTS: dict[str, Any] = {
    "jit": nn.jit,
    "remat": nn.remat,
    "scan": lambda cls: nn.scan(
        cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    ),
    "vmap": lambda cls: nn.vmap(
        cls, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    ),
    "remat scan": lambda cls: LIFTS["scan"](nn.remat(cls)),
}


def lifted(nn: Any, how: str, where: str) -> Any:
    """Returns a lifted class, or one that has a module of it and a parameter before it."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, *args):
            x = x * 2 + self.param("position", NORMAL, (1, 4))
            return LIFTS[how](block(nn))(name="block")(x, *args)

    return Outer if where == "inside" else LIFTS[how](block(nn))


@pytest.mark.parametrize("how", LIFTS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_lifted_classes_multiply_in_half_and_sum_gradients_in_float32(way, how, where):
    plain = lifted(flax_nn, how, where)()
    args = (jnp.tile(X, (2, 1)),) if how == "vmap" else (jnp.tile(X, (2, 1)), None)
    variables = plain.init(KEY, *args)
    model = (
        lifted(nn, how, where)(dtype_policy=MIXED)
        if way == "ours"
        else nn.apply_policy(plain, MIXED)
    )

    def loss(variables, model=model):
        return apply(model, variables, *args)[0].astype(jnp.float32).sum()

    ops = operations(jax.grad(loss), variables)
    assert {op.inputs for op in named(ops, "dot_general")} == {HALF}
    sums = {op.outputs for op in named(ops, "reduce_sum") if op.is_backward}
    assert sums == {("float32",)} or (how == "vmap" and where == "outermost" and not sums)
    out, truth = (apply(each, variables, *args)[0] for each in (model, plain))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))


@pytest.mark.parametrize("how", ["jit", "remat"])
def test_lifted_methods(how):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            cls = block(nn)
            return getattr(nn, how)(cls.twice)(cls(), x)

    model: Any = Outer(dtype_policy=MIXED)
    dots = named(operations(model.apply, model.init(KEY, X), X), "dot_general")
    assert len(dots) == 4 and {op.inputs for op in dots} == {HALF}


def fresh_cache(nn: Any) -> Any:
    """Attention's cache without a cast, in a module for each half of a pair of imports."""

    class Writes(nn.Module):
        how: str
        in_setup: bool = False

        def setup(self):
            if self.in_setup:
                self.made = self.made_there()

        def made_there(self):
            return self.variable("cache", "keys", jnp.zeros, (8, 4), jnp.bfloat16)

        @nn.compact
        def __call__(self, x, _=None):
            cache = self.made if self.in_setup else self.made_there()
            index = self.variable("cache", "index", lambda: jnp.array(0))
            key = self.param("key", nn.initializers.ones, (4, 4))
            for _ in range(2):
                update = jax.lax.dynamic_update_slice
                if self.how == "slice":
                    cache.value = update(cache.value, x @ key, (index.value, 0))
                else:
                    cache.value = cache.value.at[index.value].set((x @ key)[0])
                index.value = index.value + 1
            return x + cache.value.sum(0, keepdims=True), None

    class Scans(nn.Module):
        how: str

        @nn.compact
        def __call__(self, x, _=None):
            axes = {"params": 0, "cache": 0}
            body = nn.scan(Writes, axes, split_rngs={"params": True}, length=2)
            return body(self.how)(x, None)

    class Inside(nn.Module):
        how: str
        in_setup: bool = False

        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(Writes(self.how, self.in_setup)(x)[0]), None

    return {
        "alone": Writes,
        "inside": Inside,
        "setup": lambda how: Writes(how, True),
        "inside, setup": lambda how: Inside(how, True),
        "scan": Scans,
    }


@pytest.mark.parametrize("where", fresh_cache(nn))
@pytest.mark.parametrize("wing", ["ours", "port"])
@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_fresh_cache_in_half_may_be_written_with_what_the_code_computes(how, wing, where):
    plain = fresh_cache(flax_nn)[where](how)
    model = (
        fresh_cache(nn)[where](how).clone(dtype_policy=MIXED)
        if wing == "ours"
        else nn.apply_policy(plain, MIXED)
    )
    variables = model.init(KEY, X[:1])
    _, fresh = model.apply({"params": variables["params"]}, X[:1], mutable=["cache"])
    (out, _), state = model.apply(variables, X[:1], mutable=["cache"])
    structures = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)
        for tree in (variables["cache"], fresh["cache"], state["cache"])
    ]
    assert structures[0] == structures[1] == structures[2] and out.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fresh)} == {"bfloat16", "int32"}
    for a, b in zip(
        jax.tree.leaves(fresh["cache"]), jax.tree.leaves(variables["cache"]), strict=True
    ):
        np.testing.assert_array_equal(a, b)
