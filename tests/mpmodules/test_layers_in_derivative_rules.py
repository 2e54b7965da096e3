"""Layers that are called by the rules of a custom_vjp function, which JAX traces after the call."""

from __future__ import annotations

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mpmodules.wings import BOTH, Text, X, dense

linen_call = lambda layer, x: flax.linen.custom_vjp(  # noqa: E731
    lambda layer, x: layer(x),
    lambda layer, x: flax.linen.vjp(lambda layer, x: layer(x), layer, x),
    lambda pullback, ct: (pullback(ct)[0], 2 * pullback(ct)[1]),
)(layer, x)


@flax.nnx.custom_vjp
def nnx_call(layer: Any, x: Any) -> Any:
    return layer(x)


def backward(saved: Any, cotangents: Any) -> Any:
    graph, state = flax.nnx.split(saved[0])
    _, pullback = jax.vjp(lambda state, x: flax.nnx.merge(graph, state)(x), state, saved[1])
    of_layer, of_x = pullback(cotangents[1])
    return of_layer, 2 * of_x


nnx_call.defvjp(lambda layer, x: (layer(x), (layer, x)), backward)


def doubled(self: Any, x: jax.Array) -> jax.Array:
    """Its first layer has twice its input's gradient."""
    is_nnx = flax.nnx.Module in type(self).mro()
    call = nnx_call if is_nnx else linen_call
    return self.last(jnp.tanh(call(self.first, x)))


TEXT = Text(doubled, first=dense(4, 4), last=dense(4, 4))


@BOTH
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_a_layer_in_the_rules_of_a_custom_vjp_returns_float32_to_them(wing, way, policy, jit):
    def gradients(model: Any) -> Any:
        run = jax.jit(model.pure) if jit else model.pure
        loss = lambda p, x: jnp.sum(run(p, x).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.tree.leaves(jax.grad(loss, (0, 1))(model.params, X))

    plain, model = wing.theirs(TEXT), (wing.port if way == "port" else wing.ours)(TEXT, policy)
    leaves = zip(jax.tree.leaves(plain.params), jax.tree.leaves(model.params), strict=True)
    same = [a.astype(b.dtype) for a, b in leaves]  # nnx draws in half what it stores in half
    model.params = jax.tree.unflatten(jax.tree.structure(model.params), same)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a - b) < 2**-5 * np.linalg.norm(b)
