"""Train steps of image classifiers: ResNet-50, ViT-S/16 and ViT-B/16, for images of 224x224."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import mpmodules.linen
from benchmarks import linen_models
from benchmarks.estimates import resnet
from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from policy import losses


def resnet50(images: int, mesh: Mesh | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step of `benchmarks/estimates/resnet.py` for so many images of a device."""
    return resnet.example(mesh, images=images)


def vit(
    images: int, mesh: Mesh | None = None, *, side: int = 224, **sizes: int
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step of a vision transformer, and the shapes that it is called with.

    Args:
      images: of a device.
      mesh: the devices.
      side: of an image, in pixels.
      sizes: of the model.
    """
    nn: Any = mpmodules.linen
    model = linen_models.of(nn).VisionTransformer(patches=(side // 16) ** 2, **sizes)
    count = images * devices_of(mesh)
    batch = jax.ShapeDtypeStruct((count, side, side, 3), jnp.float32), int32(count)
    params = jax.eval_shape(model.init, jax.random.key(0), batch[0])["params"]

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch[0])
        each = losses.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return each.mean(), batch_stats

    return train_step(loss_fn, adamw(), params, (), batch, mesh)


vit_s16 = functools.partial(vit, layers=12, width=384, heads=6)
vit_b16 = functools.partial(vit, layers=12, width=768, heads=12)
