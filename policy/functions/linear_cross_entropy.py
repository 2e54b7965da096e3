"""Softmax cross-entropy of a linear layer's logits, a chunk of examples at a time.

The logits of all examples are never in memory together. A chunk's logits are multiplied, reduced
and, where the loss is differentiated, turned into its part of the gradients at once, so that
backward multiplies nothing again.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

from policy.core.arrays import is_typed
from policy.core.dtypes import backend
from policy.core.scope import current_policy, reduction_dtype_of
from policy.functions.linear_cross_entropy_chunks import Options, loss_of
from policy.functions.losses import check_weights
from policy.programs.dtypes import explicit_sharding

# Examples of a chunk. With fewer, reading and writing the sum of the kernel's gradient takes longer
# than a chunk's matmuls on TPUs. An example and class takes 3 bytes, for slopes in 16 bits and the
# float32 logits of a part.
_FEWEST, _MOST, _CHUNKS, _PARTS = 1638, 2048, 8, 4
_FEWEST_OF_A_PART = 256


def linear_softmax_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    ignore_index: int | None = None,
    reduction: Literal["mean", "sum", "none"] | None = "mean",
    axis: int = -1,
    axis_name: Hashable = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
) -> Array:
    """Computes the cross-entropy of ``softmax(x @ kernel + bias)`` without the logits in memory.

    The loss is that of `softmax_cross_entropy_with_integer_labels` for these logits. Operands are
    multiplied in compute_dtype, also in backward and where the policy has 8-bit matmuls;
    accumulators, the softmax, and the sums of both gradients over the chunks are in
    reduction_dtype. Without a policy, compute_dtype is that of `x`. With a `reduction`, forward
    computes the gradients, and differentiating costs the three matmuls of a linear layer; without
    one, backward multiplies the logits again. Second derivatives are those of reverse mode alone:
    `jax.grad` of `jax.grad`.
    References: Hsu et al. 2024, "Liger Kernel" (arXiv:2410.10989); Wijmans et al. 2024, "Cut Your
    Losses" (arXiv:2411.09009).

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from policy import losses
    >>> x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16)
    >>> loss = losses.linear_softmax_cross_entropy(x, kernel, jnp.array([3, 5]))
    >>> loss.dtype, f"{loss:.4f}"  # log 8
    (dtype('float32'), '2.0794')

    Args:
      x: (..., d) floating: the inputs of the last linear layer.
      kernel: (d, K) floating; with ``axis=0`` (K, d), as the table of an embedding.
      labels: (...) integers in [0, K), of any width; negative ones count from the end. The loss and
        the gradients of others are NaN.
      bias: (K,) floating, or None. It is added to the accumulators.
      weights: (...) of the examples, which no gradient is computed for; an example of weight 0 may
        hold anything. None counts each once.
      ignore_index: examples with this label have weight 0, as in torch, where it is -100.
      reduction: "mean" is the weighted mean, 0 if all weights are 0; "sum" the weighted sum; "none"
        or None returns the weighted loss of each example.
      axis: the axis of the classes in `kernel`.
      axis_name: inside `jax.shard_map`, the mesh axis, or axes, that the classes of `kernel` and
        `bias` are split over; labels count the classes of all devices. The mean is that of a
        device's examples: take "sum" and divide by `jax.lax.psum` of the weights where they
        differ. Under `jax.jit` with sharded arrays, leave it None: XLA reduces over the devices by
        itself, and with `jax.set_mesh` gathers a kernel that is split along d once.
      label_smoothing, z_loss: as in `softmax_cross_entropy_with_integer_labels`.
      soft_cap: positive: logits become ``soft_cap * tanh(logits / soft_cap)``.
      chunk_size: examples of a device whose derivatives by the logits are in memory together, in
        compute_dtype, beside the logits of a quarter of them. None takes 1638 to 2048. Fewer take
        longer.

    Returns:
      A scalar, or (...) without a `reduction`, in reduction_dtype.

    Raises:
      TypeError: `x` or `kernel` is not floating, or `labels` are not integers.
      ValueError: shapes that don't fit, or an option out of range.
      NotImplementedError: it is differentiated in forward mode.
    """
    x, kernel, labels = jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    _check(x, kernel, labels, bias, axis)
    check_weights(label_smoothing, z_loss)
    _check_options(reduction, soft_cap, chunk_size)
    policy, wide = current_policy(), reduction_dtype_of(x, kernel)
    sharding, mesh = explicit_sharding(jax.typeof(x)), jax.sharding.get_abstract_mesh()
    is_on_mesh = sharding is not None or (not mesh.empty and {*mesh.axis_types} == {AxisType.Auto})
    reduces = reduction in ("mean", "sum")
    operands = x.dtype if policy is None else policy.compute_dtype
    chunks, parts, size = _counts(labels.size, mesh.size if is_on_mesh else 1, chunk_size)
    options = Options(
        operands=operands,
        wide=wide,
        axis=axis % 2,
        axis_names=_mapped(axis_name),
        smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
        chunks=chunks,
        parts=parts,
        size=size,
        adds_labels=operands.itemsize > 2 and not _rounds_operands(),
        reduces=reduces,
        is_on_mesh=is_on_mesh,
    )
    weight = _weights(labels, weights, ignore_index, wide)
    if reduction == "mean":
        whole = jnp.sum(weight)
        weight = weight / jnp.where(whole == 0, 1, whole)
    run: Any = functools.partial(loss_of, options)
    if sharding is not None:
        spec = PartitionSpec(*(() if reduces else sharding.spec[:-1]))
        run = jax.sharding.auto_axes(run, axes=sharding.mesh.axis_names, out_sharding=spec)
    return run(x, labels, weight, kernel, *([] if bias is None else [bias]))


def _rounds_operands() -> bool:
    """Returns whether matmuls of float32 round their operands to bfloat16, as a TPU's do by
    default.
    """
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    return backend()[0] == "tpu" and precision in (None, "default", "fastest", "bfloat16")


def _check_options(reduction: Any, soft_cap: float | None, chunk_size: int | None) -> None:
    if reduction not in ("mean", "sum", "none", None):
        expected = "'mean', 'sum', 'none' or None"
        raise ValueError(f"reduction should be {expected}, but got {reduction!r}.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap should be positive, but got {soft_cap!r}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size should be at least 1, but got {chunk_size!r}.")


def _mapped(axis_name: Any) -> tuple[Any, ...]:
    """Returns the names of mapped axes; raises ValueError if one is not mapped."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,) * (axis_name is not None)
    for name in names:
        is_typed(name)
    return names


def _counts(examples: int, devices: int, chunk_size: int | None) -> tuple[int, int, int]:
    """Returns the numbers of chunks, of parts in each, and of examples in each part.

    On several devices they divide the examples, if they can: padding would move examples from
    device to device.
    """
    local = -(-examples // devices)
    size = min(max(local // _CHUNKS, _FEWEST), _MOST) if local > _MOST else _MOST
    fewest = max(1, -(-local // chunk_size) if chunk_size else local // size)
    parts = min(_PARTS, max(1, local // fewest // _FEWEST_OF_A_PART))
    for chunks in range(fewest, 2 * fewest if devices > 1 else fewest + 1):
        if examples % (chunks * parts * devices) == 0:
            return chunks, parts, examples // (chunks * parts)
    rows = -(-examples // (fewest * parts))
    return fewest, parts, rows if rows < 8 else -(-rows // 8) * 8  # tiles of a TPU have 8 rows


def _weights(labels: Array, weights: Any, ignore_index: int | None, wide: Any) -> Array:
    """Returns the weights of the examples, in the accumulators' dtype."""
    weight = jnp.ones_like(labels, wide) if weights is None else jnp.asarray(weights).astype(wide)
    weight = lax.stop_gradient(jnp.broadcast_to(weight, labels.shape))
    limits = jnp.iinfo(labels.dtype)
    if ignore_index is None or not limits.min <= ignore_index <= limits.max:
        return weight
    return jnp.where(labels == ignore_index, 0, weight)


def _check(x: Array, kernel: Array, labels: Array, bias: Array | None, axis: int) -> None:
    for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} should be floating, but got {array.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels should be integers, but got {labels.dtype}.")
    if axis not in (-2, -1, 0, 1):
        raise ValueError(f"axis should be 0 or -1, but got {axis!r}.")
    if x.ndim < 1 or kernel.ndim != 2 or kernel.shape[1 - axis % 2] != x.shape[-1]:
        expected = f"kernel {'(d, K)' if axis % 2 else '(K, d)'} for axis={axis}"
        got = f"{x.shape} and {kernel.shape}"
        raise ValueError(f"x should be (..., d) and {expected}, but got {got}.")
    if labels.shape != x.shape[:-1]:
        expected = f"the shape of x without its last axis, {x.shape[:-1]}"
        raise ValueError(f"labels should have {expected}, but got {labels.shape}.")
    if bias is not None and bias.shape != (kernel.shape[axis],):
        raise ValueError(f"bias should be ({kernel.shape[axis]},), but got {bias.shape}.")
