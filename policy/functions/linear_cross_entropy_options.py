"""The options of `linear_softmax_cross_entropy`, and its labels, as its chunks read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from policy.core.dtypes import ScaledMatmul


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a loss, as a static argument.

    Attributes:
      operands: the dtype that is multiplied.
      wide: the dtype of accumulators, sums and the loss.
      matmul: the 8-bit dtypes of the matmuls, or None.
      axis: the axis of the classes in the kernel.
      axis_names: the mesh axes that the classes are split over by `jax.shard_map`.
      smoothing, z_loss, soft_cap: as in `linear_softmax_cross_entropy`.
      chunks: the number of chunks.
      parts: the number of parts of each.
      size: the number of examples of a part.
      slices: the number of slices of the classes that a chunk's exponentials are computed in; 0
        where the logits of parts are.
      reduces: whether the loss is a sum.
      is_on_mesh: whether a mesh is in force, whose axes XLA splits arrays over.
    """

    operands: np.dtype
    wide: np.dtype
    matmul: ScaledMatmul | None
    axis: int
    axis_names: tuple[Any, ...]
    smoothing: float
    z_loss: float
    soft_cap: float | None
    chunks: int
    parts: int
    size: int
    slices: int
    reduces: bool
    is_on_mesh: bool


def counted(labels: Array, classes: int) -> Array:
    """Returns labels as int32: negative ones count from the end, and -1 is out of range."""
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    is_beyond = labels >= classes
    if jnp.issubdtype(labels.dtype, jnp.signedinteger):
        is_beyond |= labels < -classes
        labels = jnp.where(labels < 0, labels + classes, labels)
    return jnp.where(is_beyond, -1, jnp.where(is_beyond, 0, labels).astype(jnp.int32))
