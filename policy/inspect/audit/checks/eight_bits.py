"""Casts to 8 bits without a scale, matmuls of dequantised codes, and accumulators of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from policy.inspect.audit.finding_kinds import ACCUMULATOR, DEQUANTISED, UNSCALED, finding, shape_of
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.ranges import interval_of
from policy.inspect.audit.scales import is_constant, is_scaled_by_itself, least_size
from policy.inspect.audit.values import (
    bits,
    followed,
    is_eight_bits,
    is_matmul,
    is_narrow,
    moved_from,
    reached,
)
from policy.programs.operations import size
from policy.programs.primitives import ADDITIONS, CASTS, MOVES_DATA, PRODUCTS
from policy.programs.reading.graph import Value, is_joint

_KEEPS_CODES = MOVES_DATA | CASTS | {"mul"}
_FAR = 64  # values that are searched behind a matmul's operand


def unscaled_casts(flow: Flow) -> Iterator[Finding]:
    """Yields casts of floats to float8 or int8 whose operand may be beyond the dtype's range.

    An operand is within it by a scale that is computed from it, or by limits that the program sets:
    a clip, a bounded function, a small dtype. Casts to int8 count where the codes are multiplied or
    returned.
    """
    for node in flow.graph.nodes:
        if node.name != "convert_element_type" or not bits(node.inputs[0].dtype):
            continue
        operand, dtype = node.inputs[0], node.out.dtype
        if not is_eight_bits(dtype) or is_eight_bits(operand.dtype) or is_constant(operand):
            continue
        if dtype == "int8" and not _are_codes(node.out):
            continue
        low, high = _limits(dtype)
        if interval_of(operand).within(low, high) or is_scaled_by_itself(operand):
            continue
        yield finding(UNSCALED, node, _told(operand, dtype, high), (operand.dtype, dtype))


def _limits(dtype: str) -> tuple[float, float]:
    info = jnp.iinfo(dtype) if dtype == "int8" else jnp.finfo(dtype)
    return float(info.min), float(info.max)


def _told(operand: Value, dtype: str, largest: float) -> str:
    has_infinity = dtype != "int8" and bool(jnp.isinf(jnp.asarray(jnp.inf, dtype)))
    lost = (
        "saturate or wrap, by backend, NaN becomes a number, and fractions are cut off"
        if dtype == "int8"
        else f"become {'infinite' if has_infinity else 'NaN'}, and small ones become zero"
    )
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


def dequantised_matmuls(flow: Flow) -> Iterator[Finding]:
    """Yields floating matmuls of which both operands are widened 8-bit codes.

    One such operand is no finding: weights that are stored in 8 bits, and multiplied with
    activations in half precision, save memory as intended.
    """
    for node in flow.matmuls:
        dtypes = [value.dtype for value in node.inputs[:2]]
        if len(dtypes) < 2 or any(is_eight_bits(dtype) or not bits(dtype) for dtype in dtypes):
            continue
        codes = [_codes_of(value) for value in node.inputs[:2]]
        if codes[0] and codes[1]:
            kinds = tuple(dict.fromkeys(codes))
            message = (
                f"{node.name} multiplies {' and '.join(kinds)} codes that were just widened: it "
                f"runs in {dtypes[0]}, unless a compiler recognises the pattern. Multiply the "
                f"codes themselves with preferred_element_type={_wide(codes[0])}, and the product "
                "by the scales; m= in a policy does this."
            )
            yield finding(DEQUANTISED, node, message, tuple(dict.fromkeys((*kinds, *dtypes))))


def _wide(codes: str) -> str:
    return "int32" if codes == "int8" else "float32"


def _codes_of(value: Value) -> str:
    """Returns the dtype of the 8-bit codes that a value is, times a scale; "" if it is none."""
    for one in followed([value], _multiples, _FAR):
        maker = one.maker
        if maker is not None and maker.name in CASTS and is_eight_bits(maker.inputs[0].dtype):
            return maker.inputs[0].dtype
    return ""


def _multiples(value: Value) -> list[Value]:
    """Returns the operands of which a value may be a multiple, shifted by a zero point."""
    node = value.maker
    if node is None:
        return []
    if node.name in MOVES_DATA:
        return [moved_from(node, value)]
    if node.name in CASTS or node.name in ("row", "rows"):
        return node.inputs[:1]
    if node.name in PRODUCTS | ADDITIONS:
        one, other = node.inputs
        if _is_scale(other, value):
            return [one]
        if _is_scale(one, value) and node.name != "div":
            return [other]
    return []


def _is_scale(value: Value, of: Value) -> bool:
    """Returns whether a value is a constant, or has fewer numbers than an array until repeated."""
    return is_constant(value) or least_size(value) < max(size(of.shape), 2)


def narrow_accumulators(flow: Flow) -> Iterator[Finding]:
    """Yields matmuls of 8-bit operands whose result has less than the range of their sums.

    bfloat16 has that of float32: a result in it is rounded once more at most.
    """
    for node in flow.matmuls:
        dtypes = [value.dtype for value in node.inputs[:2]]
        if len(dtypes) < 2 or not all(map(is_eight_bits, dtypes)):
            continue
        result = node.out.dtype
        if "int8" in dtypes:
            if result not in ("int8", "int16"):
                continue
            why = f"sums of int8 products overflow {result} after a few terms"
        elif is_narrow(result) and result != "bfloat16":
            why = f"the sum, in units of the scales, may be beyond the range of {result}"
        else:
            continue
        message = (
            f"{node.name} of {dtypes[0]} returns {result}: {why}. Pass "
            f"preferred_element_type={_wide(dtypes[0])}, and round after scaling."
        )
        yield finding(ACCUMULATOR, node, message, tuple(dict.fromkeys((*dtypes, result))))
