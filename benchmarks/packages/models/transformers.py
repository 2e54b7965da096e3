"""transformers: encoders, decoders and encoder-decoders, with their caches."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.packages.cases import Case

B, T = 2, 12


def cases() -> Iterator[Case]:
    """Tiny models of transformers' Flax classes."""
    for name, head, config, inputs, call in (
        ("T5 encoder-decoder", "T5ForConditionalGeneration", _T5, _pairs, _encode_decode),
        (
            "BART, token by token with caches",
            "BartForConditionalGeneration",
            _BART,
            _prefixes,
            _with_caches,
        ),
        ("GPT-2", "GPT2LMHeadModel", _GPT2, _tokens, _decode),
        ("BERT", "BertForMaskedLM", _BERT, _tokens, _bert),
        ("Whisper", "WhisperForConditionalGeneration", _WHISPER, _speech, _whisper),
        ("CLIP", "CLIPModel", _CLIP, _images_and_texts, _clip),
    ):
        yield Case(f"transformers: {name}", _maker(head, config), inputs, call, has_option=True)


_SMALL = {"vocab_size": 40, "d_model": 32}
_T5 = (
    "T5Config",
    {**_SMALL, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
)
_SIZES = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_BART = (
    "BartConfig",
    {
        **_SMALL,
        **_SIZES,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    },
)
_GPT2 = (
    "GPT2Config",
    {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
)
_BERT = (
    "BertConfig",
    {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
)
_WHISPER = (
    "WhisperConfig",
    {
        **_SMALL,
        **_SIZES,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 12,
        "max_target_positions": 32,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dropout": 0.0,
    },
)
_CLIP_PART = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_CLIP = (
    "CLIPConfig",
    {
        "text_config": {
            **_CLIP_PART,
            "vocab_size": 40,
            "max_position_embeddings": 32,
            "eos_token_id": 39,
        },
        "vision_config": {**_CLIP_PART, "image_size": 16, "patch_size": 4},
        "projection_dim": 16,
    },
)


def _maker(head: str, config: tuple[str, dict[str, Any]]) -> Callable[[Any], Any]:
    def make(dtype: Any) -> Any:
        transformers: Any = importlib.import_module("transformers")
        built = getattr(transformers, config[0])(**config[1])
        model = getattr(transformers, f"Flax{head}")(
            built, dtype=dtype or jnp.float32, _do_init=False
        )
        return model.module

    return make


def _ids(generator: np.random.Generator, length: int = T) -> np.ndarray:
    return generator.integers(3, 39, (B, length), dtype=np.int32)


def _tokens(generator: np.random.Generator) -> tuple[Any, ...]:
    return (_ids(generator),)


def _pairs(generator: np.random.Generator) -> tuple[Any, ...]:
    return _ids(generator), _ids(generator, 6)


def _prefixes(generator: np.random.Generator) -> tuple[Any, ...]:
    return _ids(generator), _ids(generator, 3)


def _speech(generator: np.random.Generator) -> tuple[Any, ...]:
    return generator.normal(size=(B, 16, 24)).astype(np.float32), _ids(generator, 6)


def _images_and_texts(generator: np.random.Generator) -> tuple[Any, ...]:
    ids = _ids(generator)
    ids[:, -1] = 39
    return ids, generator.normal(size=(B, 16, 16, 3)).astype(np.float32)


def _positions(ids: Any) -> Any:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


def _encode_decode(module: Any, ids: Any, targets: Any) -> Any:
    return module(ids, jnp.ones_like(ids), targets, jnp.ones_like(targets)).logits


def _decode(module: Any, ids: Any) -> Any:
    return module(ids, jnp.ones_like(ids), _positions(ids)).logits


def _bert(module: Any, ids: Any) -> Any:
    return module(ids, jnp.ones_like(ids), jnp.zeros_like(ids), _positions(ids), None).logits


def _whisper(module: Any, features: Any, ids: Any) -> Any:
    return module(features, ids, jnp.ones_like(ids), _positions(ids)).logits


def _clip(module: Any, ids: Any, pixels: Any) -> Any:
    out = module(ids, pixels, jnp.ones_like(ids), _positions(ids))
    return out.logits_per_image, out.text_embeds, out.image_embeds


def _with_caches(module: Any, ids: Any, targets: Any) -> Any:
    """Decodes token by token, each step with the keys and values of those before it."""
    mask, attends = jnp.ones_like(ids), jnp.ones_like(targets)
    encoder, decoder = module.model.encoder, module.model.decoder
    encoded = encoder(ids, mask, _positions(ids))[0]
    decoder(targets, attends, _positions(targets), encoded, mask, init_cache=True)
    steps = [slice(i, i + 1) for i in range(targets.shape[1])]
    positions = _positions(targets)
    hidden = [decoder(targets[:, at], attends, positions[:, at], encoded, mask)[0] for at in steps]
    return jnp.concatenate(hidden, axis=1)
