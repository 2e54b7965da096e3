"""Decoders of any depth, in every way that this library has of putting one under a policy, and
threaded by hand.

Params are shapes: one layer is initialized, abstractly, and stands for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx

from benchmarks import linen_models
from mpmodules import PolicyRules, use_policy
from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy.autocasting.transform import autocast

FLAX: Any = flax.linen  # a module, which hashes
POLICY = "mixed_bfloat16"
BF16 = jnp.bfloat16
WIDTH, HEADS, VOCABULARY = 64, 4, 256
TOKENS = jax.ShapeDtypeStruct((4, 32), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss and what it is called with.

    Attributes:
      loss: of params and `others`.
      params, others: trees of shapes.
    """

    loss: Callable[..., jax.Array]
    params: Any
    others: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.params, *self.others


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def transformer_params(
    layers: int, width: int, heads: int, vocabulary: int, tokens: Any = TOKENS
) -> Any:
    """The params of `linen_models.Transformer`, as shapes: float32."""
    module = linen_models.of(FLAX).Transformer(None, 1, width, heads, vocabulary)
    params: dict[str, Any] = dict(jax.eval_shape(module.init, jax.random.key(0), tokens)["params"])
    block = params.pop("block_0")
    return params | {f"block_{i}": block for i in range(layers)}


def linen(
    layers: int,
    *,
    nn: Any = flax.linen,
    dtype: Any = None,
    policy: str | None = None,
    rules: bool = False,
    applied: bool = False,
    width: int = WIDTH,
    heads: int = HEADS,
) -> Program:
    """A linen decoder.

    Args:
      nn: whose layers.
      dtype: threaded through by hand.
      policy: what it is called under.
      rules: whether each layer has a path rule of its own; it says what the policy says.
      applied: whether the policy comes from `apply_policy`, for layers that know nothing of it.
    """
    module = linen_models.of(nn).Transformer(dtype, layers, width, heads, VOCABULARY)
    if applied:
        module, policy = our_linen.apply_policy(module, POLICY), None
    named = PolicyRules([(f"block_{i}", POLICY) for i in range(layers)]) if rules else None

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        if policy is None:
            return cross_entropy(module.apply({"params": params}, tokens), labels)
        with use_policy(policy, named):
            return cross_entropy(module.apply({"params": params}, tokens), labels)

    return Program(loss, transformer_params(layers, width, heads, VOCABULARY), (TOKENS, TOKENS))


def autocasted(layers: int) -> Program:
    """The decoder without dtypes, under autocast."""
    program = linen(layers)
    return dataclasses.replace(program, loss=autocast(program.loss, POLICY, params=0))


def scanned(
    layers: int, *, nn: Any = flax.linen, dtype: Any = None, policy: str | None = None
) -> Program:
    """The blocks of the decoder alone, in one `nn.scan`."""
    module = _scanned_of(nn)(dtype, layers)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(module.apply({"params": params}, x).astype(jnp.float32)))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if policy is None:
            return apply(params, x.astype(dtype))
        with use_policy(policy):
            return apply(params, x)

    x = jax.ShapeDtypeStruct((*TOKENS.shape, WIDTH), jnp.float32)
    params = jax.eval_shape(_scanned_of(FLAX)(None, layers).init, jax.random.key(0), x)["params"]
    return Program(loss, params, (x,))


@functools.cache
def _scanned_of(nn: Any) -> Any:
    class Layer(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return linen_models.of(nn).Block(HEADS, self.dtype)(x), None

    class Scanned(nn.Module):
        dtype: Any = None
        layers: int = 2

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            over = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            return over(self.dtype)(x, None)[0]

    return Scanned


@functools.cache
def nnx_of(nnx: Any) -> SimpleNamespace:
    """The decoder's classes over `flax.nnx`, or `mpmodules.nnx`."""

    class Block(nnx.Module):
        def __init__(self, width: int, heads: int, rngs: Any, **threaded: Any):
            self.first, self.second = (
                nnx.LayerNorm(width, rngs=rngs, **threaded) for _ in range(2)
            )
            self.attention = nnx.MultiHeadAttention(
                heads, width, decode=False, rngs=rngs, **threaded
            )
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **threaded)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **threaded)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Transformer(nnx.Module):
        def __init__(self, layers: int, rngs: Any, **threaded: Any):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs, **threaded)
            self.positions = nnx.Embed(TOKENS.shape[1], WIDTH, rngs=rngs, **threaded)
            self.blocks = nnx.List([Block(WIDTH, HEADS, rngs, **threaded) for _ in range(layers)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **threaded)
            self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs, **threaded)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.logits(self.norm(x))

    return SimpleNamespace(Transformer=Transformer)


def nnx(
    layers: int, *, of: Any = flax_nnx, dtype: Any = None, policy: str | None = None
) -> Program:
    """An nnx decoder, as a loss of its params."""
    threaded = {} if dtype is None else {"dtype": dtype}

    def build() -> Any:
        options = threaded if policy is None else {"dtype_policy": policy}
        return nnx_of(of).Transformer(layers, flax_nnx.Rngs(0), **options)

    graph, params, rest = flax_nnx.split(flax_nnx.eval_shape(build), flax_nnx.Param, ...)

    def loss(params: Any, rest: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(flax_nnx.merge(graph, params, rest)(tokens), labels)

    return Program(loss, params, (rest, TOKENS, TOKENS))


# What each kind of program is, of any number of layers.
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "linen by hand": functools.partial(linen, dtype=BF16),
    "linen": functools.partial(linen, nn=our_linen, policy=POLICY),
    "linen, a path rule a layer": functools.partial(linen, nn=our_linen, policy=POLICY, rules=True),
    "apply_policy": functools.partial(linen, applied=True),
    "autocast": autocasted,
    "nnx by hand": functools.partial(nnx, dtype=BF16),
    "nnx": functools.partial(nnx, of=our_nnx, policy=POLICY),
    "scanned by hand": functools.partial(scanned, dtype=BF16),
    "scanned": functools.partial(scanned, nn=our_linen, policy=POLICY),
}
# What they are held against, and what is held against it.
GROUPS = {
    "linen by hand": ("linen", "linen, a path rule a layer", "apply_policy", "autocast"),
    "nnx by hand": ("nnx",),
    "scanned by hand": ("scanned",),
}
