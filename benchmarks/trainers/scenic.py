"""scenic: ViT, ResNet and attention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model
from benchmarks.trainers.sources import Trainer


def _make(dtype: Any, module: str, name: str, **options: Any) -> Any:
    half = {} if dtype is None else {"dtype": dtype}
    return getattr(importlib.import_module(f"scenic.{module}"), name)(**options, **half)


_vit = functools.partial(_make, module="projects.baselines.vit", name="ViT")
_resnet = functools.partial(_make, module="projects.baselines.resnet", name="ResNet")
_attention = functools.partial(
    _make, module="model_lib.layers.attention_layers", name="MultiHeadAttention"
)


def _train(module: Any, images: Any) -> Any:
    return module(images, train=True)


def _attend(module: Any, inputs: Any) -> Any:
    return module(inputs, None)


def _normal(generator: np.random.Generator, *shape: int) -> Any:
    return (generator.normal(size=shape).astype(np.float32),)


def _images(batch: int, size: int) -> Any:
    return lambda generator: _normal(generator, batch, size, size, 3)


def models() -> Iterator[Model]:
    """Yields the models: ViT with learned and with fixed positions, ResNet, attention alone."""
    part = functools.partial
    small = {"num_layers": 2, "mlp_dim": 128, "num_heads": 4, "hidden_size": 64}
    small = {**small, "patches": SimpleNamespace(size=(8, 8)), "num_classes": 10}
    base = {"num_layers": 1, "mlp_dim": 3072, "num_heads": 12, "hidden_size": 768}
    base = {**base, "patches": SimpleNamespace(size=(16, 16)), "num_classes": 1000}
    rates = {"stochastic_depth": 0.1}
    large = Case("", part(_vit, **base, **rates), _images(64, 256), _train, True)
    vit = part(_vit, **small, **rates)
    yield Model("scenic: ViT", vit, _images(4, 32), _train, True, large)
    fixed = part(vit, positional_embedding="sinusoidal_2d", classifier="map")
    yield Model("scenic: ViT, fixed positions", fixed, _images(4, 32), _train, True)
    large = Case("", part(_resnet, num_outputs=1000, num_layers=14), _images(64, 224), _train, True)
    resnet = part(_resnet, num_outputs=10, num_layers=11, num_filters=16)
    yield Model("scenic: ResNet", resnet, _images(8, 32), _train, True, large)
    attention = part(_attention, num_heads=4, dropout_rate=0.1)
    yield Model(
        "scenic: MultiHeadAttention", attention, lambda g: _normal(g, 4, 16, 64), _attend, True
    )


_LAYERS, _BASELINES = "scenic/model_lib/layers", "scenic/projects/baselines"
TRAINER = Trainer(
    name="scenic",
    url="https://github.com/google-research/scenic",
    revision="0cce82dbc32df69b6017021cc2992b3f82248a05",
    files={
        f"{_LAYERS}/attention_layers.py": (
            "455ec1eae7fb41c71bd5328a1db062b6885828a251d7f0c94f1335ee2da38ac6"
        ),
        f"{_LAYERS}/nn_layers.py": (
            "8f4349dc58080fbc778171c1fd72afead8a85e9316a53194e2c2a990a576185c"
        ),
        f"{_BASELINES}/resnet.py": (
            "25b3817852eb7e7e9d930751c78cbc58076f9c6fd1ee041615b5ce1cd629944f"
        ),
        f"{_BASELINES}/vit.py": "4241610ca97d128030a813a44308806669bb2df828155e847eb0df866c8ada40",
    },
    models=models,
    stubs=("ml_collections", "tensorflow", "scenic.common_lib", "scenic.model_lib.base_models"),
)
