"""openpi: the Gemma of its policies, two experts with LoRA and adaptive norms, and its cache."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model
from benchmarks.trainers.sources import Trainer


def _gemma() -> Any:
    for module, decorator in _IDENTITIES.items():
        setattr(importlib.import_module(module), decorator, lambda x: x)
    return importlib.import_module("openpi.models.gemma")


def _experts(dtype: Any, sizes: tuple[dict[str, int], ...], ranks: tuple[int, ...]) -> Any:
    """Returns a module of openpi's: its own `init` would stand in the way of linen's."""
    gemma = _gemma()
    adapters = [gemma.lora.LoRAConfig(rank=rank, alpha=float(rank)) for rank in ranks]
    configs = [
        gemma.Config(**size, lora_configs={"attn": adapter, "ffn": adapter})
        for size, adapter in zip(sizes, adapters, strict=True)
    ]
    fields = {field.name for field in dataclasses.fields(gemma.Module)}
    half = {"embed_dtype": "float32" if dtype is None else "bfloat16"}

    class Experts(gemma.nn.Module):
        def setup(self) -> None:
            own = half if "embed_dtype" in fields else {}
            self.llm = gemma.Module(configs=configs, adarms=True, **own)

        def __call__(self, *inputs: Any, **options: Any) -> Any:
            return self.llm(*inputs, **options)

        def embed(self, tokens: Any) -> Any:
            return self.llm.embed(tokens)

    gemma.PALIGEMMA_VOCAB_SIZE = 256
    return Experts()


def _both(module: Any, tokens: Any, actions: Any, condition: Any) -> Any:
    """Prefix and suffix at once, as in training."""
    prefix, positions, mask = module.embed(tokens), *_causal(tokens, actions)
    return module([prefix, actions], positions, mask, [None, condition])[0]


def _from_images(module: Any, prefix: Any, actions: Any, condition: Any) -> Any:
    return module([prefix, actions], *_causal(prefix, actions), [None, condition])[0]


def _cached(module: Any, tokens: Any, actions: Any, condition: Any) -> Any:
    """The suffix with the keys and values of the prefix, as in sampling, and these."""
    prefix, (positions, mask) = module.embed(tokens), _causal(tokens, actions)
    length = tokens.shape[1]
    first = positions[:, :length], mask[:, :length, :length]
    (out, _), cache = module([prefix, None], *first, [None, condition])
    rest = positions[:, length:], mask[:, length:]
    (_, suffix), _ = module([None, actions], *rest, [None, condition], kv_cache=cache)
    return out, suffix


def _denoised(module: Any, actions: Any, condition: Any, keys: Any, values: Any) -> Any:
    positions, mask = _causal(keys[0], actions)
    length = keys.shape[2]
    inputs = [None, actions], positions[:, length:], mask[:, length:], [None, condition]
    return module(*inputs, kv_cache=(keys, values))[0]


def _causal(first: Any, second: Any) -> tuple[Any, Any]:
    batch, length = first.shape[0], first.shape[1] + second.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return positions, jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool)), (batch, length, length)
    )


def _suffix(generator: np.random.Generator, batch: int, length: int, width: int) -> Any:
    shapes = (batch, length, width), (batch, width)
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in shapes)


def _tokens(generator: np.random.Generator, width: int) -> Any:
    return generator.integers(256, size=(2, 24)), *_suffix(generator, 2, 8, width)


def _embedded(generator: np.random.Generator) -> Any:
    prefix = generator.normal(size=(16, 816, 2048)).astype(np.float32)
    return prefix, *_suffix(generator, 16, 51, 1024)


def _filled(generator: np.random.Generator) -> Any:
    cache = np.zeros((2, 2, 16, 816, 1, 256), jnp.bfloat16)
    return *_suffix(generator, 16, 51, 1024), *cache


def models() -> Iterator[Model]:
    """Yields the models: a step of training; the cache of a prefix, and a step with it."""
    part, heads = functools.partial, {"depth": 2, "num_heads": 8, "num_kv_heads": 1}
    small = (
        {"width": 64, "mlp_dim": 128, "head_dim": 16, **heads},
        {"width": 32, "mlp_dim": 64, "head_dim": 16, **heads},
    )
    wide = (
        {"width": 2048, "mlp_dim": 16_384, "head_dim": 256, **heads},
        {"width": 1024, "mlp_dim": 4096, "head_dim": 256, **heads},
    )
    make, inputs = part(_experts, sizes=small, ranks=(4, 4)), part(_tokens, width=32)
    large = part(_experts, sizes=wide, ranks=(16, 32))
    training = Case("", large, _embedded, _from_images, True)
    yield Model("openpi: Gemma, two experts", make, inputs, _both, True, training)
    step = Case("", large, _filled, _denoised, True)
    yield Model("openpi: Gemma with a cache", make, inputs, _cached, True, step, backward=False)


_IDENTITIES = {
    "openpi.shared.array_typing": "typecheck",
    "openpi.training.sharding": "activation_sharding_constraint",
}
_FOLDER = "src/openpi/models"
TRAINER = Trainer(
    name="openpi",
    url="https://github.com/Arist12/openpi",
    revision="ce7c439b53a3e3a44ff6574a538dd6f9953c81ee",
    files={
        f"{_FOLDER}/gemma.py": "d56e424bea8bdf6f49831c5b45db3e187cfafb90876db11d20974a47c7ff86fa",
        f"{_FOLDER}/lora.py": "c4b67ed83861f50096b5f17351b54a1b7e46e3c0f697abc55beb8276834dd284",
    },
    models=models,
    stubs=("openpi.shared", "openpi.training"),
    wheels=("einops==0.8.2",),
    root="src",
)
