"""big_vision: ViT, and SigLIP's two towers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model, draw_images
from benchmarks.trainers.sources import Trainer


def _half(dtype: Any) -> dict[str, Any]:
    return {} if dtype is None else {"dtype_mm": "bfloat16"}


def _vit(dtype: Any, **options: Any) -> Any:
    vit = importlib.import_module("big_vision.models.vit")
    return vit.Model(**options, **_half(dtype))


def _siglip(dtype: Any, image: dict[str, Any], text: dict[str, Any], out_dim: int) -> Any:
    towers = importlib.import_module("big_vision.models.proj.image_text.two_towers")
    image = {"pool_type": "map", **image, **_half(dtype)}
    return towers.Model(
        image=image, text=text, out_dim=(None, out_dim), temperature_init=10.0, bias_init=-10.0
    )


def _logits(module: Any, images: Any) -> Any:
    return module(images)[0]


def _embeddings(module: Any, images: Any, text: Any) -> Any:
    return module(images, text)[:2]


def _pairs(generator: np.random.Generator, batch: int, size: int, length: int, words: int) -> Any:
    tokens = generator.integers(words, size=(batch, length), dtype=np.int32)
    return (*draw_images(generator, batch, size), tokens)


def models() -> Iterator[Model]:
    """Yields the models: ViT as a loop over blocks and as a scan with remat, SigLIP."""
    part = functools.partial
    small = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
    patches = {**small, "patch_size": (8, 8)}
    wide = {"variant": "B/16", "depth": 1}
    vit = part(_vit, num_classes=10)
    large = Case(
        *("", part(_vit, num_classes=1000, **wide), part(draw_images, batch=64, size=256)),
        *(_logits, True),
    )
    images = part(draw_images, batch=4, size=32)
    # Upstream's last norm and head take no dtype: they are in float32, whatever `dtype_mm` is.
    rules = {"Transformer/encoder_norm": "float32", "head": "float32"}
    small_vit = part(vit, **patches)
    yield Model("big_vision: ViT", small_vit, images, _logits, True, large, rules)
    scanned = part(vit, scan=True, posemb="sincos2d", pool_type="tok", **patches)
    yield Model("big_vision: ViT, scanned, fixed positions", scanned, images, _logits, True)
    text = {**small, "vocab_size": 32}
    towers = part(_siglip, image=patches, text=text, out_dim=64)
    pairs = part(_pairs, batch=4, size=32, length=8, words=32)
    large = Case(
        "",
        part(_siglip, image=wide, text={"variant": "B", "depth": 1}, out_dim=768),
        part(_pairs, batch=64, size=256, length=64, words=32_000),
        _embeddings,
        True,
    )
    yield Model("big_vision: SigLIP", towers, pairs, _embeddings, True, large)


_FOLDER = "big_vision/models"
TRAINER = Trainer(
    name="big_vision",
    url="https://github.com/google-research/big_vision",
    revision="5f95305cdb93f8da81fb21178a5024cff5ad4f96",
    files={
        f"{_FOLDER}/vit.py": "1a4476f5d218ba621ec1bc3687f9df4d7fff083a00d45fa497f8b162801540e4",
        f"{_FOLDER}/proj/image_text/text_transformer.py": (
            "7389026623006969916ff78094e4dbd7a774897751e4e9c1912c2a9e9c0b32ae"
        ),
        f"{_FOLDER}/proj/image_text/two_towers.py": (
            "5ae4709deda8bb6d85f58c707fe442fcf787aeb1dc4a9e2f934cda6873969e57"
        ),
    },
    models=models,
    stubs=("big_vision.utils", "big_vision.models.common"),
)
