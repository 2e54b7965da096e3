"""A train step of the language model of `examples/language_model.py`, in the sizes of Flax's lm1b.

    python -m policy estimate benchmarks/estimates/language_model.py:example --on v5e

Six layers of width 512, a vocabulary of 30000, 49.7 million params in linen; 32 texts of 128 tokens
a device. Each device holds all params and moments; the batch is split over all devices. The loss
holds no logits: it is `losses.linear_softmax_cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from examples.language_model import Config, Decoder
from policy import losses
from policy.optim.storage_modes import MasterWeights

LM1B = Config(
    vocab_size=30000, width=512, layers=6, heads=8, mlp_width=2048, length=128, batch_size=32
)

QUICK = {"config": Config(length=32, batch_size=4, layers=1)}


def flops_by_hand(config: Config = LM1B) -> float:
    """Returns the FLOPs of a device's matmuls: 6 for each token and weight of the blocks and the
    head, 12 for each pair of positions and each of the width.
    """
    block = 4 * config.width**2 + 2 * config.width * config.mlp_width
    weights = config.layers * block + config.width * config.vocab_size
    pairs = config.layers * config.width * config.length
    return config.batch_size * config.length * (6.0 * weights + 12.0 * pairs)


def example(
    mesh: Mesh | None = None,
    master_weights: MasterWeights = "auto",
    moment_dtype: str | None = None,
    config: Config = LM1B,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under the policy in force, and the shapes that it is called with.

    Args:
      mesh: the devices.
      master_weights, moment_dtype: see `adamw`.
      config: the sizes; its batch is that of a device.
    """
    model = Decoder(config)
    tokens = int32(config.batch_size * devices_of(mesh), config.length)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss_fn(params: Any, batch_stats: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        hidden: Any = model.apply({"params": params}, tokens, train=True, hidden=True)
        kernel, bias = params["head"]["kernel"], params["head"]["bias"]
        return losses.linear_softmax_cross_entropy(hidden, kernel, tokens, bias), batch_stats

    return train_step(loss_fn, adamw(master_weights, moment_dtype), params, (), tokens, mesh)
