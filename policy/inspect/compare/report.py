"""The rows of a comparison, which its table and chart show."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

RowKind = Literal["activation", "gradient", "parameter", "output"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Distance of the values at one place from float32's, with the worst figures of all values.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> comparison = policy.compare(jnp.square, jnp.array([1e-4], jnp.float16))
    >>> row = comparison.outputs[0]
    >>> row.dtype, row.underflow, row.subnormal
    ('float16', 1.0, 0.0)

    Attributes:
      path: the module path, as in rules; the model itself is ``Net:``, "" is outside of any module.
        For a parameter or an output: its name.
      kind: "activation": values that a module returns. "gradient": the cotangents that it returns.
        "parameter": the gradient of a parameter. "output": an output of the function.
      error: norm of the difference / norm of float32's; infinite if a value overflowed. For
        integers and booleans: the share of the elements that differ.
      cosine: of the angle between the two; for integers and booleans, the share of the elements
        that are equal.
      underflow: share of the elements that are zero but nonzero in float32.
      subnormal: share of the elements that are subnormal in their dtype.
      overflow: share of the elements that are infinite or NaN but finite in float32.
      largest: the largest magnitude.
      limit: the largest number of the dtype that came nearest to its limit.
      dtype: that dtype.
      reference_largest: the largest magnitude in float32.
      undefined: share of the elements that are infinite or NaN in float32 itself.
      entering: the worst error of the module's inputs.
      steps: the error in each step of the enclosing scans, nested as they are; () outside of any.
      primitive, source: the operation that made the error, if this row is a jump, otherwise the one
        that computed the worst value; and the line of the user's code, or the module's path and
        class if no user code called it.
      is_jump: whether the error is made here: see `Comparison.first_jump`.
    """

    path: str
    kind: RowKind
    error: float
    cosine: float
    underflow: float
    subnormal: float
    overflow: float
    largest: float
    limit: float
    dtype: str
    reference_largest: float
    undefined: float = 0.0
    entering: float = 0.0
    steps: tuple[Any, ...] = ()
    primitive: str = ""
    source: str = ""
    is_jump: bool = False

    @property
    def headroom(self) -> float:
        """The largest magnitude as a share of the dtype's largest number; above 1 on overflow."""
        return self.largest / self.limit


@dataclasses.dataclass(frozen=True)
class OperandCodes:
    """The 8-bit codes of an operand of a module's matmuls.

    >>> from policy.inspect.compare.comparison import OperandCodes
    >>> OperandCodes("up", "weight", "int8", saturated=0.01, underflow=0.02).operand
    'weight'

    Attributes:
      path: the module path, as in rules.
      operand: "input", "weight" or "cotangent": what was cast to 8 bits.
      dtype: of the codes.
      saturated: share of the elements whose code is the largest: those that were clipped, and those
        that the scale takes there, one for each scale at least.
      underflow: share of the elements that are not zero, but whose code is.
    """

    path: str
    operand: Literal["input", "weight", "cotangent"]
    dtype: str
    saturated: float
    underflow: float


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a comparison, and what is said about them all: see `Comparison`."""

    rows: tuple[Row, ...]
    first_jump: str | None = None
    jump_step: int | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    policy: str = ""
    route: str = "as written"
    unpaired: tuple[str, ...] = ()
    codes: tuple[OperandCodes, ...] = ()

    def _of(self, kind: RowKind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    @functools.cached_property
    def activations(self) -> tuple[Row, ...]:
        """The rows of the values that modules return."""
        return self._of("activation")

    @functools.cached_property
    def gradients(self) -> tuple[Row, ...]:
        """The rows of the cotangents that modules return."""
        return self._of("gradient")

    @functools.cached_property
    def parameters(self) -> tuple[Row, ...]:
        """The rows of the parameters' gradients."""
        return self._of("parameter")

    @functools.cached_property
    def outputs(self) -> tuple[Row, ...]:
        """The rows of the function's outputs."""
        return self._of("output")

    @property
    def error(self) -> float:
        """The worst error of the function's outputs; of integers, the share that differs."""
        return max((row.error for row in self.outputs), default=0.0)
