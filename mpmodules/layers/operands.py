"""Operands of matmul and convolution layers: hooks in the place of Flax's `promote_dtype`, for both
wings.

Flax's linen layers call ``promote_dtype(inputs, kernel, bias, dtype=...)``; those of nnx hand over
one tuple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from mpmodules.functions.functional import is_half, with_bias_gradient

Operands = tuple[Any, ...]


def operands_of(arrays: tuple[Any, ...]) -> Operands:
    """Returns the operands in a call of `promote_dtype`, in either wing's order."""
    return tuple(arrays[0]) if len(arrays) == 1 and isinstance(arrays[0], tuple) else arrays


@dataclasses.dataclass(frozen=True)
class PromoteToAccumulator:
    """A `promote_dtype` that casts the operands to compute_dtype and a bias to the accumulator's
    dtype.
    """

    compute_dtype: np.dtype
    accumulator_dtype: np.dtype

    def __call__(
        self, *arrays: Any, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> Operands:
        inputs, kernel, *bias = operands_of(arrays)
        return (
            jnp.asarray(inputs, self.compute_dtype),
            jnp.asarray(kernel, self.compute_dtype),
            *(None if b is None else jnp.asarray(b, self.accumulator_dtype) for b in bias),
        )


class DetachedOperands:
    """A `promote_dtype` like `PromoteToAccumulator`, whose operands, but not the bias, have no
    gradient.
    """

    def __init__(self, promote: PromoteToAccumulator):
        self._promote = promote
        self._kernels: list[jax.Array] = []

    @property
    def kernel(self) -> jax.Array:
        """Returns the kernel as it was cast, before its gradient was stopped."""
        return self._kernels[0]

    def __call__(
        self, *arrays: Any, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> Operands:
        inputs, kernel, *bias = self._promote(*arrays)
        self._kernels.append(kernel)
        return (lax.stop_gradient(inputs), lax.stop_gradient(kernel), *bias)


class DetachedBiases:
    """A `promote_dtype` that casts as Flax's does, and puts half biases behind a `stop_gradient`.

    Args:
      promote_dtype: Flax's.
    """

    def __init__(self, promote_dtype: Callable[..., Sequence[Any]]):
        self._promote_dtype = promote_dtype
        self._added: list[tuple[jax.Array, Operands]] = []

    def __call__(
        self, *arrays: Any, dtype: DTypeLike | None = None, inexact: bool = True
    ) -> Operands:
        promoted = tuple(self._promote_dtype(*arrays, dtype=dtype, inexact=inexact))
        if len(promoted) < 3 or promoted[2] is None or not is_half(promoted[2].dtype):
            return promoted
        self._added.append((operands_of(arrays)[2], promoted))
        return (*promoted[:2], lax.stop_gradient(promoted[2]))

    def with_gradients(
        self,
        y: jax.Array,
        reduction_dtype: DTypeLike,
        shape_of: Callable[[jax.Array, Operands], Sequence[int]],
    ) -> jax.Array:
        """Returns a layer's result, and gives the biases in it their gradients, summed in
        `reduction_dtype`.

        Args:
          y: the result.
          reduction_dtype: the dtype of the sum.
          shape_of: returns the shape in which the bias was added to `y`, from `y` and the operands
            as they entered the matmul: inputs, kernel and bias.
        """
        for bias, operands in self._added:
            y = with_bias_gradient(y, bias, shape_of(y, operands), reduction_dtype)
        return y
