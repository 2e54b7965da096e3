"""tunix: Llama 3 and Qwen3, each with a step of decoding, and Qwen3 with experts."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

import policy
from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model, draw_tokens, in_stored_dtype, stored_in
from benchmarks.trainers.sources import Trainer

_OPTIONS = {"rope_theta": 500_000, "norm_eps": 1e-5}


def _llama3(dtype: Any, **sizes: Any) -> Any:
    llama3 = importlib.import_module("tunix.models.llama3.model")
    return stored_in(
        llama3.Llama3(llama3.ModelConfig(**sizes, **_OPTIONS), rngs=nnx.Rngs(0)), dtype
    )


def _qwen3(dtype: Any, **sizes: Any) -> Any:
    qwen3 = importlib.import_module("tunix.models.qwen3.model")
    dtypes = {} if dtype is None else {"dtype": dtype}
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes, **_OPTIONS, **dtypes), rngs=nnx.Rngs(0))


@in_stored_dtype
def _logits(model: Any, tokens: Any) -> Any:
    """Returns the logits of a text, and those of its last token, by a step with the cache."""
    batch, length = tokens.shape
    config, dtype = model.config, getattr(model, "stored_dtype", policy.compute_dtype())
    shape = batch, length, config.num_kv_heads, config.head_dim
    dtype = getattr(config, "dtype", dtype)
    cache = {
        f"layer_{i}": {
            "k": jnp.zeros(shape, dtype),
            "v": jnp.zeros(shape, dtype),
            "end_index": jnp.zeros((batch,), jnp.int32),
        }
        for i in range(config.num_layers)
    }
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    given, cache = model(tokens[:, :-1], positions[:, :-1], cache, mask[:, :-1])
    return given, model(tokens[:, -1:], positions[:, -1:], cache, mask[:, -1:])[0]


def models() -> Iterator[Model]:
    """Yields Llama 3 and Qwen3."""
    part = functools.partial
    small = {"num_layers": 2, "vocab_size": 64, "embed_dim": 64, "hidden_dim": 128}
    small |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    tokens = part(draw_tokens, batch=2, length=17, words=64)
    wide = {"num_layers": 1, "vocab_size": 32_768, "embed_dim": 2048, "hidden_dim": 8192}
    wide |= {"num_heads": 32, "head_dim": 64, "num_kv_heads": 8}
    large = _shapes(part(_llama3, **wide))
    yield Model(
        "tunix: Llama 3, with a cache", part(_llama3, **small), tokens, _logits, True, large
    )
    wide |= {"embed_dim": 1024, "hidden_dim": 3072, "num_heads": 16, "head_dim": 128}
    large = _shapes(part(_qwen3, **wide))
    yield Model("tunix: Qwen3, with a cache", part(_qwen3, **small), tokens, _logits, True, large)
    experts = part(_qwen3, **small, num_experts=4, num_experts_per_tok=2)
    yield Model("tunix: Qwen3, with experts", experts, tokens, _logits, True)


def _shapes(make: Callable[[Any], Any]) -> Case:
    """Returns a case whose model is made of shapes."""
    tokens = functools.partial(draw_tokens, batch=4, length=1025, words=32_768)
    case = Case("", lambda dtype: nnx.eval_shape(lambda: make(dtype)), tokens, _logits)
    return dataclasses.replace(case, has_option=True)


# The wheel of PyPI has the same files: pip download --no-deps google-tunix==0.1.7, and unzip it.
# Its __init__.py is left out, which imports all of tunix.
TRAINER = Trainer(
    name="tunix",
    url="https://github.com/google/tunix",
    revision="0.1.7",
    files={
        "tunix/models/llama3/model.py": (
            "166d72dd198a9e8011d331a1776766f6685f616e4937ed14dc050c5ca92842c8"
        ),
        "tunix/models/qwen3/model.py": (
            "a1a603a1b1683acb5a25e004165da3af63558fb26069aa24a845467784182f4f"
        ),
        "tunix/generate/mappings.py": (
            "389a889d16ce9569f06a3f173fd5cad9f1a63d85f3f28c0ada3fdd0ed7924fd8"
        ),
        "tunix/utils/compat.py": (
            "f2d4af060bcfee674abf34bae4d424de2ac472921061f41da773055f36e987f3"
        ),
        "tunix/utils/env_utils.py": (
            "7444feba5ff40e204c516febd96b054dc5d7d08a93b2077068c41ad34cc9fc12"
        ),
    },
    models=models,
)
