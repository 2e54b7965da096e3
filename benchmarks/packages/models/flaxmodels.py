"""flaxmodels: StyleGAN2's generator and discriminator, which hold their parameters themselves, and
a ResNet.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.packages.cases import Case

_SIZES = {"resolution": 16, "fmap_base": 256, "fmap_max": 32}


def cases() -> Iterator[Case]:
    """Tiny models of flaxmodels."""
    yield Case("flaxmodels: StyleGAN2 generator", _generator, _latents, _generate, has_option=True)
    yield Case("flaxmodels: StyleGAN2 discriminator", _discriminator, _images, has_option=True)
    yield Case(
        "flaxmodels: ResNet18",
        _resnet,
        _images,
        lambda model, x: model(x, train=False),
        has_option=True,
    )


def _dtype(dtype: Any) -> str:
    return "float32" if dtype is None else "bfloat16"


def _stylegan2(dtype: Any) -> dict[str, Any]:
    """Returns the options of both networks; the dtype holds for so many resolutions."""
    return {**_SIZES, "dtype": _dtype(dtype), "num_fp16_res": 0 if dtype is None else 10}


def _generator(dtype: Any) -> Any:
    package: Any = importlib.import_module("flaxmodels")
    sizes = {
        "z_dim": 16,
        "w_dim": 16,
        "mapping_layer_features": 16,
        "num_ws": 6,
        "num_mapping_layers": 2,
    }
    return package.stylegan2.Generator(**_stylegan2(dtype), **sizes)


def _latents(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(2, 16)).astype(np.float32),)


def _generate(model: Any, z: Any) -> Any:
    return model(z, train=False, noise_mode="const")


def _discriminator(dtype: Any) -> Any:
    package: Any = importlib.import_module("flaxmodels")
    return package.stylegan2.Discriminator(**_stylegan2(dtype), mapping_layers=2)


def _resnet(dtype: Any) -> Any:
    package: Any = importlib.import_module("flaxmodels")
    return package.ResNet18(
        output="logits", pretrained=None, num_classes=10, normalize=False, dtype=_dtype(dtype)
    )


def _images(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(4, 16, 16, 3)).astype(np.float32),)
