"""State-space scans: mamba2-jax, recurrentgemma's Griffin, memorax's memories. dantinox's decoder,
with caches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.packages.cases import Case
from benchmarks.packages.stubs import stubbed

B, T = 2, 16
_NOT_USED = (
    "gymnax",
    "wandb",
    "tensorboard",
    "tensorboardX",
    "matplotlib",
    "neptune_scale",
    "pandas",
    "brax",
    "gxm",
    "navix",
)


def cases() -> Iterator[Case]:
    """Tiny models of mamba2-jax, recurrentgemma, dantinox and memorax."""
    yield Case("mamba2-jax: Mamba-2", _mamba, _tokens, lambda model, ids: model(ids)["logits"])
    yield Case("recurrentgemma: Griffin", _griffin, _tokens, _griffin_logits, has_option=True)
    yield Case(
        "dantinox: decoder with caches",
        _maker({"kv_heads": 2, "attention": "gqa"}),
        _tokens,
        _with_caches,
    )
    yield Case("dantinox: mixture of experts", _maker({"ffn": "moe"}), _tokens, _logits)
    for name in ("S5", "LRU", "mLSTM"):
        yield Case(f"memorax: {name} policy", _policy(name), _episode, has_option=True)


def _tokens(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.integers(1, 40, (B, T), dtype=np.int32),)


def _mamba(dtype: Any) -> Any:
    package: Any = importlib.import_module("mamba2_jax")
    sizes = {
        "hidden_size": 32,
        "state_size": 8,
        "head_dim": 8,
        "chunk_size": 8,
        "num_hidden_layers": 2,
    }
    return package.Mamba2ForCausalLM(package.Mamba2Config(vocab_size=40, **sizes), rngs=nnx.Rngs(0))


def _griffin(dtype: Any) -> Any:
    with stubbed("sentencepiece"):
        package: Any = importlib.import_module("recurrentgemma.jax")
        common: Any = importlib.import_module("recurrentgemma.common")
    blocks = (common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION)
    config = common.GriffinConfig(
        vocab_size=40,
        width=32,
        mlp_expanded_width=64,
        num_heads=4,
        block_types=blocks,
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    return package.Griffin(config, dtype=dtype)


def _griffin_logits(model: Any, ids: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return model(ids, positions, return_logits=True, return_cache=False)[0]


def _maker(options: dict[str, Any]) -> Callable[[Any], Any]:
    def make(dtype: Any) -> Any:
        core: Any = importlib.import_module("dantinox.core.config")
        config = core.ModelConfig(
            dim=32, n_heads=4, num_blocks=2, vocab_size=40, max_context=32, **options
        )
        return importlib.import_module("dantinox.core.model").Transformer(config, rngs=nnx.Rngs(0))

    return make


def _logits(model: Any, ids: Any) -> Any:
    return model(ids, deterministic=True).logits


def _with_caches(model: Any, ids: Any) -> Any:
    """Reads all tokens but the last four at once, and those one by one."""
    caches, logits, done = tuple((None, None) for _ in range(model.num_blocks)), [], 0
    for length in (T - 4, 1, 1, 1, 1):
        out = model(
            ids[:, done : done + length], caches=caches, cache_index=done, deterministic=True
        )
        caches, done = out.kv_caches, done + length
        logits.append(out.logits)
    return jnp.concatenate(logits, axis=1)


def _policy(name: str) -> Callable[[Any], Any]:
    def make(dtype: Any) -> Any:
        import flax.linen as nn

        with stubbed(*_NOT_USED):
            networks: Any = importlib.import_module("memorax.networks")
            memories: Any = importlib.import_module("memorax.networks.sequence_models")
        sizes = {
            "S5": {"state_size": 8},
            "LRU": {"hidden_dim": 16},
            "mLSTM": {"hidden_dim": 16, "num_heads": 2},
        }
        options = {} if dtype is None else {"dtype": dtype}
        cell = getattr(memories, f"{name}Cell")(features=16, **sizes[name], **options)
        return networks.Network(
            feature_extractor=networks.FeatureExtractor(
                observation_extractor=nn.Dense(16, **options)
            ),
            torso=memories.Memoroid(cell=cell),
            head=networks.heads.DiscreteQNetwork(action_dim=4),
        )

    return make


def _episode(generator: np.random.Generator) -> tuple[Any, ...]:
    flags = np.zeros((B, T), np.int32)
    observation = generator.normal(size=(B, T, 6)).astype(np.float32)
    return observation, flags, flags, flags.astype(np.float32), flags
