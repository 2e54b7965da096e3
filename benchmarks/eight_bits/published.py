"""A published model whose weights and activations are multiplied in 8 bits, with no training."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import policy as mp
from benchmarks.eight_bits.report import Table
from mpmodules import nnx

POLICIES = {
    "float32": "float32",
    "mixed_bfloat16": "mixed_bfloat16",
    "mixed_float8": "mixed_float8",
    "float8, `tensor`": "p=f32,c=bf16,o=f32,m=f8:tensor",
    "mixed_int8": "mixed_int8",
    "int8, `tensor`": "p=f32,c=bf16,o=f32,m=i8:tensor",
}
DOWN = ".*/mlp/down=p=f32,c=bf16"
KEPT = {  # of SmolLM2, with a rule that keeps the last matrix of each block
    "mixed_float8, `mlp/down` in bfloat16": "mixed_float8",
    "mixed_int8, `mlp/down` in bfloat16": "mixed_int8",
}
CACHES = {  # of SmolLM2: the dtype of its keys and values
    "bfloat16": "mixed_bfloat16",
    "int8": "p=f32,c=bf16,o=f32,k=i8",
    "float8": "p=f32,c=bf16,o=f32,k=f8",
}
CACHE_BOUND = 0.005  # nats that an int8 cache may cost
TOKENS = 20  # generated after each prompt
WINDOWS, WINDOW, BATCH = 16, 128, 4  # of the text whose loss is taken: tokens


@dataclasses.dataclass(frozen=True)
class Language:
    """Figures of a language model under a policy.

    Attributes:
      prompts: how many are continued by float32's greedy tokens, all of them.
      tokens: how many greedy tokens are float32's, after float32's own text.
      error: the largest error of a logit on that text, beside float32's.
      loss: nats a token of a text.
    """

    prompts: int
    tokens: int
    error: float
    loss: float


@nnx.jit
def _loss(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean loss of (B, T) tokens but the first ones, in nats a token, with keys and values as
    the cache holds them.
    """
    given = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(given.shape[1]), given.shape)
    logits = model(given, positions, cache_length=given.shape[1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def language(
    model: Any, prompts: Sequence[Sequence[int]], text: np.ndarray, reference: Any = None
) -> tuple[Language, Any]:
    """Returns a model's figures, and what it generates.

    Args:
      model: the example's `Decoder`, under its policy.
      prompts: tokens.
      text: (batches, B, T) tokens whose loss is taken.
      reference: what float32's model generated; None if this is it.
    """
    from examples import smollm2_generate as job

    forced = None if reference is None else reference.tokens
    with tqdm(disable=True) as bar:
        generation = job.generate(model, [list(prompt) for prompt in prompts], TOKENS, bar, forced)
    mine = generation if reference is None else reference
    same = generation.logits.argmax(-1) == mine.tokens  # (B, N)
    error = float(np.abs(generation.logits - mine.logits).max())
    parts = nnx.split(model)  # of each batch a model without a cache
    losses = [_loss(nnx.merge(*parts), jnp.asarray(batch)) for batch in text]
    loss = float(np.mean(losses))
    return Language(int(same.all(1).sum()), int(same.sum()), error, loss), generation


def _smollm2_text(tokenizer: Any) -> np.ndarray:
    """Windows (batches, BATCH, WINDOW) of the language model's held-out text."""
    from examples import language_model

    text = language_model.load_text()
    start = len(text) - int(0.05 * len(text))
    tokens = tokenizer.encode(text[start : start + 8 * WINDOWS * WINDOW]).ids
    return np.array(tokens[: WINDOWS * WINDOW], np.int32).reshape(-1, BATCH, WINDOW)


def smollm2() -> Table:
    """Generates with SmolLM2-135M, and takes the loss of a text, under every policy."""
    found, prompts = _languages({**POLICIES, **KEPT})
    return _of_language(found, prompts)


def smollm2_cache() -> Table:
    """The same with keys and values cached in each dtype."""
    found, prompts = _languages(CACHES)
    table = _of_language(found, prompts, "cache of SmolLM2-135M")
    rise = found["int8"].loss - found["bfloat16"].loss
    missed = f"the loss with an int8 cache rises by {rise:.4f} nats, bound {CACHE_BOUND}"
    return dataclasses.replace(table, missed=(missed,) if rise > CACHE_BOUND else ())


def _languages(policies: dict[str, str]) -> tuple[dict[str, Language], int]:
    """Returns SmolLM2's figures under policies, the first of which is the reference, and how many
    prompts there are.
    """
    from examples import smollm2_generate as job

    reader = job.gguf.GGUFReader(job.find_weights())
    config, tokenizer = job.config_of(reader), job.tokenizer_of(reader)
    weights, text = job.weights_of(reader, config), _smollm2_text(tokenizer)
    prompts = [tokenizer.encode(prompt).ids for prompt in job.PROMPTS]
    found: dict[str, Language] = {}
    reference = None
    for name, policy in policies.items():
        rules = mp.PolicyRules.from_texts([DOWN] if name in KEPT else [])
        model = job.build(config, weights, mp.get_policy(policy), rules)
        found[name], generation = language(model, prompts, text, reference)
        reference = generation if reference is None else reference
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found, len(prompts)


def _of_language(found: dict[str, Language], prompts: int, title: str = "SmolLM2-135M") -> Table:
    first = next(iter(found))
    base = found[first].loss
    rows = tuple(
        (
            name,
            f"{figures.tokens} of {prompts * TOKENS}",
            f"{figures.loss:.4f}",
            f"{figures.loss - base:+.4f}",
        )
        for name, figures in found.items()
    )
    header = (title, f"tokens as {first}'s", "loss", f"compared with {first}")
    return Table(header, rows)
