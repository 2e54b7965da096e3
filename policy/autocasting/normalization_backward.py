"""Backward passes of normalisations in programs that hold them, as ``autocast(jax.grad(f))``."""

from __future__ import annotations

from collections.abc import Sequence

from policy.programs.frames import MOVES, Data, FrameOperation
from policy.programs.primitives import BROADCASTS, ELEMENTWISE, SCALINGS

_SUMS = frozenset(("reduce_sum",))
# Linear operations: with one operand, or with parameters and numbers as the other.
_LINEAR = SCALINGS | {"add_any"}
_FOLLOWED = MOVES | ELEMENTWISE | _SUMS


def backward_of(
    operations: Sequence[FrameOperation],
    measures: set[FrameOperation],
    applies: set[FrameOperation],
) -> None:
    """Adds the backward passes of normalisations to their operations.

    These are the products of cotangents with statistics and with the centred input, the sums of
    those products, and their broadcasts to the shape of the input. They run in float32 and return
    half precision, as the forward pass does. Cotangents of other activations are not affected.
    """
    cotangents = _Cotangents(_inside(measures, applies))
    for operation in operations:
        floats = [data for data in operation.inputs if data.is_float and not data.yields]
        if not floats or not operation.outputs or operation.name not in _FOLLOWED:
            continue
        is_backward = operation.is_backward and operation.equation is not None
        if not is_backward and cotangents.inside.issuperset(floats):
            cotangents.inside.add(
                operation.outputs[0]
            )  # a residual, such as that of a square, or an operand of an inner program
        elif is_backward and operation not in measures and operation not in applies:
            region = cotangents.region_of(operation, floats)
            if region is not None:
                (measures if region == "measures" else applies).add(operation)


def _inside(measures: set[FrameOperation], applies: set[FrameOperation]) -> set[Data]:
    """Returns the statistics, and the values that only normalisations read."""
    marked = measures | applies
    inside = {data for operation in measures for data in operation.outputs if data.is_float}
    for operation in applies:
        for data in operation.outputs:
            if not data.is_returned and all(
                reader in marked or reader.is_backward for reader in data.readers
            ):
                inside.add(data)
    return inside


class _Cotangents:
    """The cotangents in the backward passes of normalisations.

    Attributes:
      inside: values of the forward pass that only normalisations read.
      products: cotangents as large as the input.
      sums: cotangents of statistics and of parameters.
      spread: cotangents of statistics, broadcast to the shape of the input.
    """

    def __init__(self, inside: set[Data]):
        self.inside = inside
        self.products: set[Data] = set()
        self.sums: set[Data] = set()
        self.spread: set[Data] = set()

    def region_of(self, operation: FrameOperation, floats: Sequence[Data]) -> str | None:
        """Returns the region of an operation of the backward pass, or None; records its output."""
        kind = self._kind_of(operation, floats)
        if kind is None:
            return None
        kind.add(operation.outputs[0])
        return "measures" if kind is self.sums else "applies"

    def _kind_of(self, operation: FrameOperation, floats: Sequence[Data]) -> set[Data] | None:
        if operation.name in _SUMS:
            return self.sums if floats[0] in self.products else self._of_sums(floats)
        if self._of_sums(floats) is not None:
            return self.spread if operation.name in BROADCASTS else self.sums
        is_product = operation.name in ELEMENTWISE and any(
            data in self.inside or data in self.spread for data in floats
        )
        is_linear = operation.name in _LINEAR and self.products.issuperset(floats)
        return self.products if is_product or is_linear else None

    def _of_sums(self, floats: Sequence[Data]) -> set[Data] | None:
        """Returns `sums` if the operation is arithmetic on cotangents of statistics, otherwise
        None.

        The other operands are values that only normalisations read.
        """
        has_sum = not self.sums.isdisjoint(floats)
        return (
            self.sums
            if has_sum and all(data in self.sums or data in self.inside for data in floats)
            else None
        )
