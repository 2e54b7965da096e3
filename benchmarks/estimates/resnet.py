"""A train step of the ResNet-50 of `examples/resnet_fashion_mnist.py`, for images of 224x224 and
1000 classes.

    python -m policy estimate benchmarks/estimates/resnet.py:example --on v5e

25.6 million params in linen, 64 images a device. Each device holds all params and moments; the
batch is split over all devices, and its statistics are those of the whole batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from examples.resnet_fashion_mnist import MODELS
from policy.optim.storage_modes import MasterWeights

CLASSES, IMAGES = 1000, 64
QUICK = {"model": "ResNet8", "images": 2, "side": 32}


def flops_by_hand() -> float:
    """Returns the FLOPs of a device's convolutions: 6 for each of the 4.09e9 multiply-adds of an
    image that torchvision publishes for its ResNet-50.
    """
    return IMAGES * 6.0 * 4.09e9


def example(
    mesh: Mesh | None = None,
    master_weights: MasterWeights = "auto",
    moment_dtype: str | None = None,
    model: str = "ResNet50",
    images: int = IMAGES,
    side: int = 224,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under the policy in force, and the shapes that it is called with.

    Args:
      mesh: the devices.
      master_weights, moment_dtype: see `adamw`.
      model: one of the example's.
      images: of a device.
      side: of an image, in pixels.
    """
    net = MODELS[model](num_classes=CLASSES)
    count = images * devices_of(mesh)
    batch = jax.ShapeDtypeStruct((count, side, side, 3), jnp.float32), int32(count)
    init = functools.partial(net.init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), batch[0])

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, updated = net.apply(
            {"params": params, "batch_stats": batch_stats}, batch[0], mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch[1]
        )
        return losses.mean(), updated["batch_stats"]

    tx = adamw(master_weights, moment_dtype)
    return train_step(loss_fn, tx, variables["params"], variables["batch_stats"], batch, mesh)
