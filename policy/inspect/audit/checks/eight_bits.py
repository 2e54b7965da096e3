"""Casts to 8 bits without a scale, and accumulators of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from policy.inspect.audit import findings as kinds
from policy.inspect.audit.findings import Finding, finding, shape_of
from policy.inspect.audit.flow import (
    Flow,
    bits,
    interval_of,
    is_constant,
    is_eight_bits,
    is_matmul,
    is_narrow,
    makers,
    moved_from,
    reached,
)
from policy.programs import primitives as ops
from policy.programs.reading.graph import Node, Value, is_joint

_KEEPS_CODES = ops.MOVES_DATA | ops.CASTS | {"mul"}
_ARITHMETIC = ops.ADDITIONS | ops.PRODUCTS | ops.MINMAX | ops.ROUNDINGS | ops.SIGN_CHANGES
# Between a quotient and the cast of it: limits, rounding, noise, and changes of sign.
_BETWEEN = ops.MOVES_DATA | ops.ANNOTATES | ops.CASTS | _ARITHMETIC | {"select_n"}
_FAR = 96  # values that are searched for the origin of a scale


def unscaled_casts(flow: Flow) -> Iterator[Finding]:
    """Yields casts of floats to float8 or int8 whose operand may be beyond the dtype's range.

    An operand is within it by a scale that is computed from it, or by limits that the program sets:
    a clip, a bounded function, a small dtype. Casts to int8 count where the codes are multiplied or
    returned.
    """
    for node in flow.operations:
        if node.name != "convert_element_type" or not bits(node.inputs[0].dtype):
            continue
        operand, dtype = node.inputs[0], node.out.dtype
        if not is_eight_bits(dtype) or is_eight_bits(operand.dtype) or is_constant(operand):
            continue
        if dtype == "int8" and not _are_codes(node.out):
            continue
        info = jnp.iinfo(dtype) if dtype == "int8" else jnp.finfo(dtype)
        low, high = interval_of(operand)
        is_within = info.min <= low and high <= info.max
        if not is_within and not _is_scaled_by_itself(operand):
            dtypes = (operand.dtype, dtype)
            yield finding(kinds.UNSCALED, node, _told(operand, dtype, float(info.max)), dtypes)


def _told(operand: Value, dtype: str, largest: float) -> str:
    lost = "saturate or wrap, by backend, NaN becomes a number, and fractions are cut off"
    if dtype != "int8":
        becomes = "infinite" if jnp.isinf(jnp.asarray(jnp.inf, dtype)) else "NaN"
        lost = f"become {becomes}, and small ones become zero"
    return (
        f"{shape_of(operand)} is cast to {dtype} without a scale that was computed from it, and "
        f"without clipping: numbers beyond {largest:g} {lost}. Divide by a scale computed from it "
        f"(its largest magnitude / {largest:g}), clip, and multiply the product by the scale; m= "
        "in a policy does all of this."
    )


def _are_codes(value: Value) -> bool:
    """Returns whether integers are multiplied, as they are or widened, or returned."""
    passes = lambda node: node.name in _KEEPS_CODES or is_joint(node)  # noqa: E731
    return any(
        each.is_output or any(map(is_matmul, each.readers)) for each in reached([value], passes)
    )


def narrow_accumulators(flow: Flow) -> Iterator[Finding]:
    """Yields matmuls of 8-bit operands whose result has less than the range of their sums.

    bfloat16 has that of float32: a result in it is rounded once more at most.
    """
    for node in flow.matmuls:
        dtypes, result, why = [value.dtype for value in node.inputs[:2]], node.out.dtype, ""
        if "int8" in dtypes and result in ("int8", "int16"):
            why = f"sums of int8 products overflow {result} after a few terms"
        elif "int8" not in dtypes and is_narrow(result) and result != "bfloat16":
            why = f"the sum, in units of the scales, may be beyond the range of {result}"
        if why and len(dtypes) == 2 and all(map(is_eight_bits, dtypes)):
            wide = "int32" if dtypes[0] == "int8" else "float32"
            message = (
                f"{node.name} of {dtypes[0]} returns {result}: {why}. Pass "
                f"preferred_element_type={wide}, and round after scaling."
            )
            yield finding(kinds.ACCUMULATOR, node, message, tuple(dict.fromkeys((*dtypes, result))))


# --------------------------------------------------------------------------------------------------
# Scales that are computed from an array
# --------------------------------------------------------------------------------------------------


def _is_scaled_by_itself(value: Value) -> bool:
    """Returns whether a value was divided by, or multiplied with, a scale computed from it.

    Limits, rounding, casts and constants may follow.
    """

    def keeps(node: Node) -> bool:
        return node.name in _BETWEEN or is_joint(node)

    def scaled(node: Node) -> list[Value]:
        return [one for one in node.inputs if not is_constant(one)] if keeps(node) else []

    return any(keeps(node) and _is_scaling(node) for node in makers(value, scaled, _FAR))


def _is_scaling(node: Node) -> bool:
    if node.name not in ops.PRODUCTS:
        return False
    pairs = [node.inputs, node.inputs[::-1]] if node.name == "mul" else [node.inputs]
    return any(
        not set(_chain(array)).isdisjoint(_chain(found.inputs[0]))
        for array, scale in pairs
        for found in _reductions(scale)
    )


def _reductions(value: Value) -> Iterator[Node]:
    """Yields the reductions that a value depends on, the nearest ones."""

    def reduces(node: Node) -> bool:
        is_reduction = node.kind == "reduction" or node.name in ops.EXTREMES | ops.ORDERS
        return bool(node.inputs) and is_reduction

    def others(node: Node) -> list[Value]:
        return [] if node.name == "carry" or is_matmul(node) or reduces(node) else node.inputs

    return filter(reduces, makers(value, others, _FAR))


def _chain(value: Value) -> Iterator[Value]:
    """Yields a value and those that it is a function of, one after another."""
    for _ in range(_FAR):
        yield value
        maker = value.maker
        if maker is None or maker.name == "carry" or is_matmul(maker) or not maker.inputs:
            return
        if maker.name in ops.MOVES_DATA or maker.name in ops.ANNOTATES:
            value = moved_from(maker, value)
            continue
        whole = {v for v in maker.inputs if not is_constant(v) and v.shape == value.shape}
        if len(whole) != 1:
            return
        (value,) = whole
