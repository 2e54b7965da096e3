"""jaxnn's models in nnx, and flaxdiff's diffusion models in linen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify

from benchmarks.packages.cases import Case
from benchmarks.packages.stubs import stubbed


def cases() -> Iterator[Case]:
    """Tiny models of jaxnn and flaxdiff."""
    yield Case("jaxnn: ViT", _vit, _images, _checked, has_option=True)
    yield Case("jaxnn: ResNet", _resnet, _images, has_option=True)
    yield Case("flaxdiff: UNet", _unet, _noised, has_option=True)
    yield Case("flaxdiff: hybrid S5 and attention", _hybrid, _noised, has_option=True)


def _images(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(4, 32, 32, 3)).astype(np.float32),)


def _jaxnn() -> Any:
    with stubbed("torchvision", "torch"):
        return importlib.import_module("jaxnn.models")


def _vit(dtype: Any) -> Any:
    return _jaxnn().VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=10,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )


def _checked(model: Any, x: Any) -> Any:
    """Calls a model that checks its input with checkify, which can't be compiled otherwise."""
    graph, state = nnx.split(model)
    return checkify.checkify(lambda state, x: nnx.merge(graph, state, copy=True)(x))(state, x)[1]


def _resnet(dtype: Any) -> Any:
    models = _jaxnn()
    return models.ResNet(
        models.BasicBlock, (1, 1, 1, 1), num_classes=10, dtype=dtype, rngs=nnx.Rngs(0)
    )


def _unet(dtype: Any) -> Any:
    return importlib.import_module("flaxdiff.models.simple_unet").Unet(
        emb_features=32,
        feature_depths=(16, 32),
        attention_configs=({"heads": 2, "dtype": dtype or jnp.float32},) * 2,
        num_res_blocks=1,
        dtype=dtype,
    )


def _hybrid(dtype: Any) -> Any:
    with stubbed("matplotlib"):
        models: Any = importlib.import_module("flaxdiff.models.ssm_dit")
    return models.HybridSSMAttentionDiT(
        patch_size=4,
        emb_features=32,
        num_layers=2,
        num_heads=4,
        ssm_state_dim=8,
        ssm_attention_ratio="1:1",
        dtype=dtype,
    )


def _noised(generator: np.random.Generator) -> tuple[Any, ...]:
    x, text = generator.normal(size=(2, 16, 16, 3)), generator.normal(size=(2, 5, 32))
    return x.astype(np.float32), np.array([0.3, 0.7], np.float32), text.astype(np.float32)
