"""Layers that are called by the rules of a custom_vjp function, which JAX traces after the call."""

from __future__ import annotations

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmodules.linen
import mpmodules.nnx

X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def linen_model(nn: Any) -> Any:
    """A class of models whose first layer has twice its input's gradient."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            call = flax.linen.custom_vjp(
                lambda layer, x: layer(x),
                lambda layer, x: flax.linen.vjp(lambda layer, x: layer(x), layer, x),
                lambda pullback, ct: (pullback(ct)[0], 2 * pullback(ct)[1]),
            )
            return nn.Dense(4)(jnp.tanh(call(nn.Dense(4), x)))

    return Model


def nnx_model(nnx: Any) -> Any:
    """The same for nnx."""

    @flax.nnx.custom_vjp
    def call(layer: Any, x: Any) -> Any:
        return layer(x)

    def backward(saved: Any, cotangents: Any) -> Any:
        graph, state = flax.nnx.split(saved[0])
        _, pullback = jax.vjp(lambda state, x: flax.nnx.merge(graph, state)(x), state, saved[1])
        of_layer, of_x = pullback(cotangents[1])
        return of_layer, 2 * of_x

    call.defvjp(lambda layer, x: (layer(x), (layer, x)), backward)

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.first, self.last = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(jnp.tanh(call(self.first, x)))

    return Model


def of_linen(model: Any) -> Any:
    return model.init(jax.random.key(0), X), model.apply


def of_nnx(model: Any) -> Any:
    graph, state = flax.nnx.split(model)
    return state, lambda state, x: flax.nnx.merge(graph, state)(x)


def models(policy: str) -> dict[str, Any]:
    linen, nnx = linen_model(flax.linen)(), nnx_model(flax.nnx)
    rngs = flax.nnx.Rngs
    return {
        "linen": of_linen(linen_model(mpmodules.linen)(dtype_policy=policy)),
        "linen port": of_linen(mpmodules.linen.apply_policy(linen, policy)),
        "nnx": of_nnx(nnx_model(mpmodules.nnx)(rngs(0), dtype_policy=policy)),
        "nnx port": of_nnx(mpmodules.nnx.apply_policy(nnx(rngs(0)), policy)),
    }


PLAIN = {
    "linen": lambda: of_linen(linen_model(flax.linen)()),
    "nnx": lambda: of_nnx(nnx_model(flax.nnx)(flax.nnx.Rngs(0))),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", ["linen", "linen port", "nnx", "nnx port"])
def test_a_layer_in_the_rules_of_a_custom_vjp_returns_float32_to_them(name, policy, jit):
    def gradients(model: Any) -> Any:
        params, apply = model
        # The same numbers for all, as they are stored.
        drawn: Any = zip(jax.tree.leaves(plain[0]), jax.tree.leaves(params), strict=True)
        drawn = [jnp.asarray(a, b.dtype) for a, b in drawn]
        params = jax.tree.unflatten(jax.tree.structure(params), drawn)
        run = jax.jit(apply) if jit else apply
        return jax.grad(lambda p, x: jnp.sum(run(p, x).astype(jnp.float32) ** 2), (0, 1))(params, X)

    plain = PLAIN[name.split()[0]]()
    found, expected = gradients(models(policy)[name]), gradients(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a - b) < 2**-5 * np.linalg.norm(b)
