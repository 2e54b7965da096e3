"""diffusers: the UNet and the autoencoder of Stable Diffusion."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.packages.cases import Case


def cases() -> Iterator[Case]:
    """Tiny models of diffusers' Flax classes."""
    yield Case("diffusers: UNet2DCondition", _unet, _noised, _denoise, has_option=True)
    yield Case(
        "diffusers: AutoencoderKL",
        _autoencoder,
        _image,
        lambda model, x: model(x).sample,
        has_option=True,
    )


def _unet(dtype: Any) -> Any:
    return importlib.import_module("diffusers").FlaxUNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        block_out_channels=(32,),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=16,
        dtype=dtype or jnp.float32,
    )


def _noised(generator: np.random.Generator) -> tuple[Any, ...]:
    x, text = generator.normal(size=(2, 4, 8, 8)), generator.normal(size=(2, 5, 16))
    return x.astype(np.float32), np.array([3, 70], np.int32), text.astype(np.float32)


def _denoise(model: Any, x: Any, times: Any, text: Any) -> Any:
    return model(x, times, text).sample


def _autoencoder(dtype: Any) -> Any:
    return importlib.import_module("diffusers").FlaxAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 32),
        norm_num_groups=8,
        sample_size=16,
        dtype=dtype or jnp.float32,
    )


def _image(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(2, 3, 16, 16)).astype(np.float32),)
