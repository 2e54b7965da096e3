"""A language model of hand-written layers in both wings: rotary attention, gated MLP, experts and
RMSNorm.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import policy
from mpmodules import full_precision, linen, nnx

WIDTH, HIDDEN, HEADS, EXPERTS, WORDS, LENGTH = 16, 32, 2, 4, 32, 8
init = jax.nn.initializers.lecun_normal()

SHAPES = {
    "attention": {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)},
    "mlp": {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
    "experts": {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    },
}


def rotated(x: jax.Array) -> jax.Array:
    """Rotates the halves of (B, T, N, H) by the position; tables are float32, the result is as x
    is.
    """
    frequencies = jnp.exp(-0.3 * jnp.arange(x.shape[-1] // 2, dtype=jnp.float32))
    angles = (
        jnp.arange(x.shape[1], dtype=jnp.float32)[None, :, None, None]
        * frequencies[None, None, None]
    )
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(x: jax.Array, qkv: Any, out: Any) -> jax.Array:
    heads = (x @ qkv).reshape(*x.shape[:-1], HEADS, -1)
    q, k, v = jnp.split(heads, 3, -1)
    logits = jnp.einsum("btnh,bsnh->bnts", rotated(q), rotated(k))
    return (
        jnp.einsum("bnts,bsnh->btnh", policy.reductions.softmax(logits), v).reshape(x.shape) @ out
    )


def mlp(x: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def experts(x: jax.Array, router: Any, up: Any, down: Any) -> jax.Array:
    weights = policy.reductions.softmax(x @ router)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, jnp.asarray(up)))
    return jnp.einsum("btef,efd,bte->btd", hidden, jnp.asarray(down), weights)


def normalized(x: jax.Array, scale: Any) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


FUNCTIONS = {"attention": attention, "mlp": mlp, "experts": experts}


def by_hand(params: Any, ids: jax.Array, dtype: Any) -> jax.Array:
    """The same model with its dtypes threaded by hand: parameters are cast at their uses, norms run
    in float32.
    """
    cast = functools.partial(jax.tree.map, lambda array: array.astype(dtype))
    x = cast(params["table"])[ids] + cast(params["position"])[None]
    for name, function in FUNCTIONS.items():
        scale = params[f"norm_{name}"]["scale"]
        y = normalized(x.astype(jnp.float32), scale.astype(jnp.float32)).astype(dtype)
        x = x + function(y, **cast(params[name]))
    return (x @ cast(params["table"]).T).astype(jnp.float32)


# --------------------------------------------------------------------------------------------------
# linen
# --------------------------------------------------------------------------------------------------


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", linen.initializers.ones, (x.shape[-1],))
        return full_precision(normalized)(x, scale)


class LinenPart(linen.Module):
    kind: str

    def setup(self) -> None:
        for name, shape in SHAPES[self.kind].items():
            setattr(self, name, self.param(name, init, shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return FUNCTIONS[self.kind](x, **{name: getattr(self, name) for name in SHAPES[self.kind]})


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.param("table", init, (WORDS, WIDTH))
        x = table[ids] + self.param("position", init, (LENGTH, WIDTH))[None]
        for kind in SHAPES:
            x = x + LinenPart(kind, name=kind)(LinenNorm(name=f"norm_{kind}")(x))
        return x @ table.T


# --------------------------------------------------------------------------------------------------
# nnx
# --------------------------------------------------------------------------------------------------


class NnxNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return full_precision(normalized)(x, self.scale[...])


class NnxPart(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs):
        self.kind = kind
        for name, shape in SHAPES[kind].items():
            setattr(self, name, nnx.Param(init(rngs.params(), shape)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return FUNCTIONS[self.kind](x, **{name: getattr(self, name) for name in SHAPES[self.kind]})


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(init(rngs.params(), (WORDS, WIDTH)))
        self.position = nnx.Param(init(rngs.params(), (LENGTH, WIDTH)))
        for kind in SHAPES:
            setattr(self, f"norm_{kind}", NnxNorm(rngs))
            setattr(self, kind, NnxPart(kind, rngs))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[ids] + self.position[None]
        for kind in SHAPES:
            x = x + getattr(self, kind)(getattr(self, f"norm_{kind}")(x))
        return x @ self.table.T
