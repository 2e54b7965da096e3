"""A train step of SmolLM2-135M, the nnx decoder of `examples/smollm2_generate.py`.

    python -m policy estimate benchmarks/estimates/smollm2.py:example --on v5e

134.5 million params; 8 texts of 2048 tokens a device. The example's blocks, but scanned, so that
one is compiled instead of thirty, and rematerialized. Each device holds all params and moments; the
batch is split over all devices. The loss holds no logits: it is
`losses.linear_softmax_cross_entropy` of the embedding's table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from examples.smollm2_generate import Block, Config, rotation_of
from mpmodules import nnx
from policy import losses
from policy.optim.storage_modes import MasterWeights

SMOLLM2 = Config(
    layers=30,
    width=576,
    heads=9,
    key_heads=3,
    head_width=64,
    hidden=1536,
    vocabulary=49152,
    theta=100000.0,
    epsilon=1e-5,
    context=2048,
)

TEXTS = 8
QUICK = {
    "texts": 2,
    "config": dataclasses.replace(
        SMOLLM2, layers=2, width=128, heads=2, key_heads=1, hidden=256, vocabulary=512, context=128
    ),
}


class Decoder(nnx.Module):
    """The example's decoder with the params of its blocks stacked, without its last matmul.

    (B, T) -> (B, T, width).
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.config = config
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.layers = stacked(rngs)
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        rotation = rotation_of(positions, config.head_width, config.theta)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @functools.partial(nnx.remat, prevent_cse=False)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x, positions, rotation, None)

        return self.norm(run(self.layers, self.embed(tokens)))


def flops_by_hand(config: Config = SMOLLM2) -> float:
    """Returns the FLOPs of a device's matmuls: 6 for each token and weight of the blocks and the
    head, 12 for each pair of positions and each of the width, and a third more of both in the
    blocks, which run forward twice, but for their last matmul.
    """
    heads = config.head_width * (config.heads + config.key_heads)
    last = config.hidden * config.width
    block = 2 * config.width * heads + 3 * last
    pairs = config.heads * config.head_width * config.context
    layers = config.layers * (8.0 * block - 2.0 * last + 16.0 * pairs)
    return TEXTS * config.context * (layers + 6.0 * config.width * config.vocabulary)


def example(
    mesh: Mesh | None = None,
    master_weights: MasterWeights = "auto",
    moment_dtype: str | None = None,
    texts: int = TEXTS,
    config: Config = SMOLLM2,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under the policy in force, and the shapes that it is called with.

    Args:
      mesh: the devices.
      master_weights, moment_dtype: see `adamw`.
      texts: of a device.
      config: the sizes.
    """
    tokens = int32(texts * devices_of(mesh), config.context)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch_stats: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params)
        labels = jnp.roll(tokens, -1, axis=1)
        is_followed = jnp.broadcast_to(
            jnp.arange(config.context) < config.context - 1, labels.shape
        )
        loss = losses.linear_softmax_cross_entropy(
            model(tokens), model.embed.embedding[...], labels, weights=is_followed, axis=0
        )
        return loss, batch_stats

    return train_step(loss_fn, adamw(master_weights, moment_dtype), params, (), tokens, mesh)
