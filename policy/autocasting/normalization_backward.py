"""Backward passes of normalisations in programs that hold them, as ``autocast(jax.grad(f))``."""

from __future__ import annotations

from collections.abc import Sequence

from policy.autocasting.second_moments import SUMS
from policy.programs.frames import MOVES, Data, FrameOperation
from policy.programs.primitives import BROADCASTS, ELEMENTWISE, SCALINGS

# Linear operations: with one operand, or with parameters and numbers as the other.
_LINEAR = SCALINGS | {"add_any"}
_FOLLOWED = MOVES | ELEMENTWISE | SUMS


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
    inside = _inside(measures, applies)
    products: set[Data] = set()  # as large as the input
    sums: set[Data] = set()  # of statistics and of parameters
    spread: set[Data] = set()  # of statistics, broadcast to the shape of the input

    def kind_of(operation: FrameOperation, floats: Sequence[Data]) -> set[Data] | None:
        """Returns the set that a cotangent belongs to, or None of one of other code."""
        name = operation.name
        of_sums = not sums.isdisjoint(floats) and all(d in sums or d in inside for d in floats)
        if of_sums or (name in SUMS and floats[0] in products):
            return spread if name in BROADCASTS else sums
        is_product = name in ELEMENTWISE and any(d in inside or d in spread for d in floats)
        is_linear = name in _LINEAR and products.issuperset(floats)
        return products if is_product or is_linear else None

    for operation in operations:
        floats = [data for data in operation.inputs if data.is_float and not data.yields]
        if not floats or not operation.outputs or operation.name not in _FOLLOWED:
            continue
        is_backward = operation.is_backward and operation.equation is not None
        if not is_backward and inside.issuperset(floats):
            # A residual, such as that of a square, or an operand of an inner program.
            inside.add(operation.outputs[0])
        elif is_backward and operation not in measures and operation not in applies:
            kind = kind_of(operation, floats)
            if kind is not None:
                kind.add(operation.outputs[0])
                (measures if kind is sums else applies).add(operation)


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
