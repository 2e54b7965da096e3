"""bonsai: Qwen3 and Gemma 3, each with a step of decoding, and ViT."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model, draw_images, draw_tokens, in_stored_dtype, stored_in
from benchmarks.trainers.sources import Trainer

_AXES = ("fsdp", "tp")  # of the mesh that Qwen3 asks for
_EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


def _cache(model: Any, make: Callable[..., Any], *sizes: Any) -> Any:
    """Makes a cache: upstream's in the dtype of the weights, the port's in compute_dtype."""
    takes_dtype = "dtype" in inspect.signature(make).parameters
    dtype = getattr(model, "stored_dtype", jnp.float32)
    return make(*sizes, dtype=dtype) if takes_dtype else make(*sizes)


# --------------------------------------------------------------------------------------------------
# Qwen3
# --------------------------------------------------------------------------------------------------


def _qwen3(dtype: Any, **sizes: Any) -> Any:
    modeling = importlib.import_module("bonsai.models.qwen3.modeling")
    none = modeling.ShardingCfg(*[(None,) * 4] * 8, *[(None,) * 3] * 3)
    options = {"rope_theta": 1_000_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4}
    rest = {"norm_eps": 1e-6, "tie_word_embeddings": False, "shd_cfg": none}
    config = modeling.ModelCfg(**sizes, **options, **rest)
    model = modeling.Qwen3(config, shd_cfg=none, rngs=nnx.Rngs(0))
    model.config = config
    mesh = jax.make_mesh((1, 1), _AXES, axis_types=_EXPLICIT)
    if not isinstance(jax.tree.leaves(nnx.state(model))[0], jax.core.Tracer):
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    return stored_in(model, dtype)


@in_stored_dtype
def _qwen3_logits(model: Any, tokens: Any) -> Any:
    """Returns the logits of a text, and those of its last token, by a step with the cache."""
    modeling, config = importlib.import_module("bonsai.models.qwen3.modeling"), model.config
    batch, length = tokens.shape
    mesh: Any = jax.typeof(model.lm_head.w[...]).sharding.mesh
    if mesh.empty:  # of shapes
        mesh = AbstractMesh((1, 1), _AXES, axis_types=_EXPLICIT)
    with jax.sharding.use_abstract_mesh(mesh):
        tokens, params = jax.sharding.reshard((tokens, nnx.state(model)), PartitionSpec())
        nnx.update(model, params)
        cache = _cache(
            *(model, modeling.init_cache),
            *(config.num_layers, batch, length, config.num_kv_heads, config.head_dim),
        )
        ones = jnp.ones_like(tokens)
        given = model(tokens[:, :-1], ones[:, :-1], 0, cache)
        return given, model(tokens[:, -1:], ones[:, -1:], 0, cache)


# --------------------------------------------------------------------------------------------------
# Gemma 3
# --------------------------------------------------------------------------------------------------


def _gemma3(_: Any, text: dict[str, Any], vision: dict[str, Any], tokens: int) -> Any:
    modeling = importlib.import_module("bonsai.models.gemma3.modeling")
    config = modeling.ModelConfig
    takes_dtype = "norm_dtype" in inspect.signature(config.gemma3_4b_it).parameters
    config = config.gemma3_4b_it(**({"norm_dtype": jnp.float32} if takes_dtype else {}))
    modes = [modeling.AttentionMode.SLIDE, modeling.AttentionMode.FULL]
    config = dataclasses.replace(
        config,
        text_config=dataclasses.replace(config.text_config, layer_types=modes, **text),
        vision_config=dataclasses.replace(config.vision_config, **vision),
        mm_tokens_per_image=tokens,
        shd_cfg=modeling.ShardConfig.no_sharding(),
    )
    return modeling.Gemma3Model(config, rngs=nnx.Rngs(0))


def _gemma3_logits(model: Any, tokens: Any, images: Any, is_image: Any) -> Any:
    """Returns the logits of a text with an image, and those of its last token, by a step with the
    cache.
    """
    modeling = importlib.import_module("bonsai.models.gemma3.modeling")
    cache = _cache(model, modeling.init_cache, model.config, tokens.shape[0], tokens.shape[1], 0)
    ones = jnp.ones_like(tokens)
    given = model(tokens[:, :-1], images, cache, ones[:, :-1], is_image[:, :-1])
    return given, model(tokens[:, -1:], None, cache, ones[:, -1:], is_image[:, -1:])


def _pairs(generator: np.random.Generator, batch: int, size: int, length: int, words: int) -> Any:
    tokens = generator.integers(1, words, size=(batch, length), dtype=np.int32)
    is_image = np.zeros((batch, length), np.int32)
    is_image[:, 3 : 3 + (256 if size > 32 else 4)] = 1
    return tokens, generator.normal(size=(batch, size, size, 3)).astype(np.float32), is_image


# --------------------------------------------------------------------------------------------------
# ViT
# --------------------------------------------------------------------------------------------------


def _vit(dtype: Any, **sizes: Any) -> Any:
    modeling = importlib.import_module("bonsai.models.vit.modeling")
    config = dataclasses.replace(modeling.ModelConfig.vit_p16_224(), **sizes)
    return stored_in(modeling.ViTClassificationModel(config, rngs=nnx.Rngs(0)), dtype)


@in_stored_dtype
def _classes(model: Any, images: Any) -> Any:
    return model(images, rngs=None)


def models() -> Iterator[Model]:
    """Yields Qwen3, Gemma 3 and ViT."""
    part = functools.partial
    small = {"num_layers": 2, "vocab_size": 64, "emb_dim": 64, "mlp_dim": 128}
    small |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    wide = {"num_layers": 1, "vocab_size": 32_768, "emb_dim": 1024, "mlp_dim": 3072}
    wide |= {"num_heads": 16, "head_dim": 128, "num_kv_heads": 8}
    large = _shapes(part(_qwen3, **wide), part(draw_tokens, batch=4, length=1025, words=32_768))
    yield Model(
        *("bonsai: Qwen3, with a cache", part(_qwen3, **small)),
        *(part(draw_tokens, batch=2, length=17, words=64), _qwen3_logits, True),
        dataclasses.replace(large, call=_qwen3_logits),
    )
    text = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 8}
    vision = {"hidden_size": 64, "image_size": 32, "intermediate_size": 128, "patch_size": 8}
    vision |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    gemma3 = part(_gemma3, text=text | {"vocab_size": 64}, vision=vision, tokens=4)
    few = {"num_hidden_layers": 2}
    large = _shapes(
        part(_gemma3, text=few | {"vocab_size": 32_768}, vision=few, tokens=256),
        part(_pairs, batch=1, size=896, length=1024, words=32_768),
    )
    yield Model(
        *("bonsai: Gemma 3, with a cache", gemma3),
        *(part(_pairs, batch=2, size=32, length=16, words=64), _gemma3_logits, False),
        dataclasses.replace(large, call=_gemma3_logits, has_option=False),
    )
    sizes = {"image_size": (32, 32), "patch_size": (8, 8), "hidden_dim": 64, "num_heads": 4}
    sizes |= {"mlp_dim": 128, "num_layers": 2, "num_labels": 10}
    large = _shapes(part(_vit, num_layers=2), part(draw_images, batch=64, size=224))
    yield Model(
        *("bonsai: ViT", part(_vit, **sizes), part(draw_images, batch=4, size=32), _classes, True),
        dataclasses.replace(large, call=_classes),
    )


def _shapes(make: Callable[[Any], Any], inputs: Callable[..., Any]) -> Case:
    """Returns a case whose model is made of shapes."""
    return Case("", lambda dtype: nnx.eval_shape(lambda: make(dtype)), inputs, has_option=True)


_FOLDER = "bonsai/models"
TRAINER = Trainer(
    name="bonsai",
    url="https://github.com/jax-ml/bonsai",
    revision="a6d79567 of Qwen3, 042bc25b of Gemma 3, 0b78c946 of ViT",
    files={
        f"{_FOLDER}/qwen3/modeling.py": (
            "d1171ca55e7825605289045f31b7a4341488eb1f0a9cd2f480a8b7de9f6b154d"
        ),
        f"{_FOLDER}/gemma3/modeling.py": (
            "5624dd0cd2a634f8fcb537f0d88fd4e992348ef790c3f750fc49905b976ae08b"
        ),
        f"{_FOLDER}/vit/modeling.py": (
            "7c5afe9dab6a288f123ebe8caa7ae61f39e1863142df5ce511253f69ae346b2b"
        ),
    },
    models=models,
    stubs=("bonsai.utils",),
)
