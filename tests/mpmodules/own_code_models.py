"""Small models whose own code multiplies, in both APIs, written as if policies did not exist."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


def attention(qkv: jax.Array) -> jax.Array:
    """(..., T, 3D) to (..., T, D), one head."""
    query, key, value = jnp.split(qkv, 3, axis=-1)
    logits = jnp.einsum("...td,...sd->...ts", query, key) / 4.0
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(logits), value)


class Projection(nn.Module):
    """A Dense written by hand."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("b", nn.initializers.zeros, (1,) * (x.ndim - 1) + (self.features,))
        return jnp.dot(x, kernel) + bias


class Block(nn.Module):
    """Attention and an MLP by hand, around Flax's LayerNorm, Dense and Dropout; branches are added
    by `lax.add`.
    """

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.Dense(16, name="out")(
            attention(Projection(48, name="qkv")(nn.LayerNorm(name="norm")(x)))
        )
        y = jax.nn.relu(Projection(32, name="up")(x))
        y = nn.Dropout(0.25, deterministic=not self.has_rng("dropout"))(y)
        return jax.lax.add(x, Projection(16, name="down")(y)), None


class Net(nn.Module):
    """Tokens to logits, with running statistics."""

    train: bool = False

    def setup(self):
        self.embed, self.head = nn.Embed(32, 16), nn.Dense(32)
        self.block, self.bn = Block(), nn.BatchNorm(use_running_average=not self.train)

    def __call__(self, tokens):
        return self.head(self.bn(self.block(self.embed(tokens))[0]))

    def hidden(self, x):
        return self.block(x)[0]


class Layers(nn.Module):
    """Blocks that are scanned over."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return scan(name="layers")(x)[0]


class NnxProjection(nnx.Module):
    """A Linear written by hand."""

    def __init__(self, features_in: int, features: int, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (features_in, features)))
        self.b = nnx.Param(jnp.zeros((1, 1, features)))

    def __call__(self, x):
        return jnp.dot(x, self.w[...]) + self.b[...]


class NnxBlock(nnx.Module):
    """`Block`, in nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.out = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.qkv, self.up = NnxProjection(16, 48, rngs), NnxProjection(16, 32, rngs)
        self.down, self.dropout = NnxProjection(32, 16, rngs), nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        x = x + self.out(attention(self.qkv(self.norm(x))))
        return jax.lax.add(x, self.down(self.dropout(jax.nn.relu(self.up(x)))))


class NnxNet(nnx.Module):
    """`Net`, in nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(32, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.block, self.bn = NnxBlock(rngs), nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.bn(self.block(self.embed(tokens))))

    def hidden(self, x):
        return self.block(x)


def error(tree: Any, truth: Any) -> float:
    """Returns the relative L2 error of a tree against one of the same structure."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(truth), strict=True))
    off = sum(float(jnp.sum(jnp.square(a.astype(jnp.float32) - b))) for a, b in pairs)
    return (off / sum(float(jnp.sum(jnp.square(b))) for _, b in pairs)) ** 0.5
