"""Counts FLOPs of matmuls and convolutions in a compiled program, by the dtype that is multiplied.

The keys are dtypes as NumPy names them, "bfloat16". A float32 product whose text asks for more or
fewer passes than a device makes by default has them in its key: "float32, highest", and
"float32, bfloat16 x3" for three products of bfloat16.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from policy.inspect.hlo.text import HloArray, Instruction, numpy_name

Flops = dict[str, float]
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)

_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
_CONVOLUTIONS = ("__cudnn$conv", "__onednn$convolution")


def contraction_flops(instruction: Instruction) -> Flops:
    """Returns the FLOPs of the matmuls and convolutions of an instruction, also of those in a
    fusion.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion":
        total: Flops = {}
        for inner in instruction.fused.instructions.values():
            add_to(total, contraction_flops(inner))
        return total
    operands = [operand.results[0] for operand in instruction.operands if operand.results]
    is_call = opcode == "custom-call"
    if len(operands) < 2 or not instruction.results:
        return {}
    if opcode == "dot" or (is_call and instruction.target.startswith(_GEMMS)):
        return {_key(instruction, operands[:2]): _dot(instruction, operands)}
    if opcode == "convolution" or (is_call and instruction.target.startswith(_CONVOLUTIONS)):
        return {_key(instruction, operands[:2]): _convolution(instruction, operands)}
    return {}


def add_to(total: dict[_Key, _Number], other: Mapping[_Key, _Number], times: int = 1) -> None:
    """Adds numbers by key to a total."""
    for key, number in other.items():
        total[key] = total.get(key, 0) + times * number


def _dot(instruction: Instruction, operands: Sequence[HloArray]) -> float:
    axes = re.findall(
        r"\d+", instruction.attribute(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
    )
    contracted = math.prod(operands[0].shape[int(axis)] for axis in axes)
    return 2.0 * math.prod(instruction.results[0].shape) * contracted


def _convolution(instruction: Instruction, operands: Sequence[HloArray]) -> float:
    """Returns the FLOPs of a convolution; products with padding and with the zeros of a dilation
    are none.

    cuDNN's derivatives have the dimensions and the window of the convolution that they are of.
    """
    result = instruction.results[0]
    source, kernel, output = operands[0], operands[1], result
    if "convBackwardInput" in instruction.target:
        source, kernel, output = result, operands[1], operands[0]
    elif "convBackwardFilter" in instruction.target:
        source, kernel, output = operands[0], result, operands[1]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0.0
    of_source, of_kernel, of_output = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), (source, kernel, output), strict=True)
    )
    products = of_output["b"] * of_kernel["i"] * of_kernel["o"]
    axes = sum(map(str.isdigit, labels[1]))
    for axis, window in enumerate(_windows(instruction.attribute(r"window=\{([^}]*)\}"), axes)):
        place = str(axis)
        products *= _pairs(of_source[place], of_kernel[place], of_output[place], *window)
    return 2.0 * products


def _windows(text: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Returns the stride, the low padding and the dilations of the input and of the kernel of each
    axis.
    """
    given = dict(part.split("=") for part in text.split())

    def numbers(name: str, default: int) -> list[int]:
        values = given[name].split("x") if name in given else [str(default)] * axes
        return [int(value.split("_")[0]) for value in values]

    names = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    columns = [numbers(name, default) for name, default in names]
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _pairs(
    size: int, kernel: int, output: int, stride: int, low: int, dilation: int, kernel_dilation: int
) -> int:
    """Counts the places of a kernel and an output along an axis that meet a number of the input."""
    (few, few_step), (many, many_step) = sorted(((kernel, kernel_dilation), (output, stride)))
    places = np.arange(many, dtype=np.int64) * many_step - low
    total = 0
    for place in range(few):
        reached = places + place * few_step
        inside = (reached >= 0) & (reached <= (size - 1) * dilation)
        total += int(np.count_nonzero(inside & (reached % dilation == 0)))
    return total


def _key(instruction: Instruction, operands: Sequence[HloArray]) -> str:
    widest = max(operands, key=lambda array: array.bytes / max(math.prod(array.shape), 1))
    dtype = numpy_name(widest.dtype)
    if dtype != "float32":
        return dtype
    name = instruction.attribute(r'(?:algorithm=|"algorithm":"ALG_)(?i:dot_(\w+))').lower()
    if not name:
        asked = instruction.attribute(r'operand_precision(?:=\{|":\[)([^\]}]*)').lower()
        level = next((level for level in ("highest", "high") if level in asked), "")
        return f"{dtype}, {level}" if level else dtype
    passes = int(found[1]) if (found := re.search(r"_x(\d)$", name)) else 1
    if name == "f32_f32_f32":
        return f"{dtype}, highest"
    multiplied = "tf32" if name.startswith("tf32") else numpy_name(name.split("_")[0])
    return dtype if (multiplied, passes) == ("tf32", 1) else f"{dtype}, {multiplied} x{passes}"
