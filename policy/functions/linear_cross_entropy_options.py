"""The options of `linear_softmax_cross_entropy`, and its labels, as its chunks read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

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
      adds_labels: whether the labels' terms are added to the gradients outside of the matmuls.
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
    adds_labels: bool
    reduces: bool
    is_on_mesh: bool


def local_labels(options: Options, labels: Array, classes: int) -> tuple[Array, Array]:
    """Returns labels as int32 beside a device's first class, and which of them are a class.

    Negative labels count from the end.

    Args:
      classes: the number of a device's classes.
    """
    names = options.axis_names
    whole = classes * (lax.axis_size(names) if names else 1)
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    is_class = labels < whole
    if jnp.issubdtype(labels.dtype, jnp.signedinteger):
        is_class &= labels >= -whole
        labels = jnp.where(labels < 0, labels + whole, labels)
    labels = jnp.where(is_class, labels, 0).astype(jnp.int32)
    return labels - (lax.axis_index(names) * classes if names else 0), is_class
