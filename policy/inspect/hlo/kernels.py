"""Counts the FLOPs of a compiled program's kernels, and the bytes that they move, by the shapes in
its text.

FLOPs are of matmuls and convolutions, by the dtype that is multiplied as NumPy names it,
"bfloat16". A float32 product whose text asks for more or fewer passes than a device makes by
default has them in its key: "float32, highest", and "float32, bfloat16 x3" for three products of
bfloat16.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from policy.inspect.hlo.text import HloArray, Instruction, numpy_name

Flops = dict[str, float]
_Arrays = Sequence[HloArray]
_Size = Callable[[_Arrays], float]
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)

_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul")
_CONVOLUTIONS = ("__cudnn$conv", "__onednn$convolution")
# Custom calls that multiply no matrices: sorts, random bits, TopK, changes of shape or layout, and
# zeros in the padding of an array that a TPU's compiler writes.
_NO_MATMULS = (
    *("__cub$", "cu_threefry", "TopK", "__gpu$TopK", "topk", "xla.gpu.topk", "AllocateBuffer"),
    *("PadToStatic", "SliceToDynamic", "Sharding", "SPMD", "LayoutConstraint", "X64", "ZeroCrop"),
)
# Figures of a convolution's window along each axis, and their defaults.
_WINDOW = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
_SLICES = ("dynamic-slice", "slice", "gather")


def add_to(total: dict[_Key, _Number], other: Mapping[_Key, _Number], times: int = 1) -> None:
    """Adds numbers by key to a total."""
    for key, number in other.items():
        total[key] = total.get(key, 0) + times * number


def arrays_of(instructions: Iterable[Instruction]) -> _Arrays:
    """Returns the results of all of some instructions."""
    return [array for instruction in instructions for array in instruction.results]


# --------------------------------------------------------------------------------------------------
# FLOPs
# --------------------------------------------------------------------------------------------------


def kernel_flops(kernel: Instruction) -> Flops | None:
    """Returns the FLOPs of a kernel's matmuls and convolutions, by the dtype that is multiplied.

    For an opaque kernel they are its author's estimate, or for JAX's splash attention and ragged
    matmuls those of its shapes; their dtype is that of its largest operand.

    Returns:
      None for an opaque kernel of which neither is known.
    """
    found: Flops = {}
    for instruction in kernel.unfused():
        add_to(found, _contraction_flops(instruction))
    if found or kernel.opcode.removesuffix("-start") != "custom-call":
        return found
    flops = _opaque_flops(kernel)
    if flops is None:
        return {} if kernel.target.startswith(_NO_MATMULS) else None
    largest = max(arrays_of(kernel.operands), key=lambda array: array.bytes, default=None)
    return {numpy_name(largest.dtype) if largest else "float32": flops} if flops else {}


def _contraction_flops(instruction: Instruction) -> Flops:
    opcode = instruction.opcode.removesuffix("-start")
    target = instruction.target if opcode == "custom-call" else ""
    operands = [operand.results[0] for operand in instruction.operands if operand.results]
    if len(operands) < 2 or not instruction.results:
        return {}
    if opcode in ("dot", "scaled-dot") or target.startswith(_GEMMS):
        return {_multiplied(instruction, operands[:2]): _dot_flops(instruction, operands[0])}
    if opcode == "convolution" or target.startswith(_CONVOLUTIONS):
        return {_multiplied(instruction, operands[:2]): _convolution_flops(instruction, operands)}
    return {}


def _dot_flops(instruction: Instruction, lhs: HloArray) -> float:
    axes = instruction.attribute(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
    contracted = math.prod(lhs.shape[int(axis)] for axis in re.findall(r"\d+", axes))
    return 2.0 * math.prod(instruction.results[0].shape) * contracted


def _convolution_flops(instruction: Instruction, operands: _Arrays) -> float:
    """Returns the FLOPs of a convolution; products with padding and with the zeros of a dilation
    are none.

    cuDNN's derivatives have the dimensions and the window of the convolution that they are of.
    """
    arrays = [*operands[:2], instruction.results[0]]  # the input, the kernel and the output
    if "convBackwardInput" in instruction.target:
        arrays = [arrays[2], arrays[1], arrays[0]]
    elif "convBackwardFilter" in instruction.target:
        arrays = [arrays[0], arrays[2], arrays[1]]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0.0
    source, kernel, output = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), arrays, strict=True)
    )
    products = output["b"] * kernel["i"] * kernel["o"]
    window = instruction.attribute(r"window=\{([^}]*)\}")
    for axis in filter(str.isdigit, labels[1]):
        figures = (_of_axis(window, name, int(axis), default) for name, default in _WINDOW)
        products *= _pairs(source[axis], kernel[axis], output[axis], *figures)
    return 2.0 * products


def _of_axis(window: str, name: str, axis: int, default: int) -> int:
    """Returns a figure of a window along an axis, of padding the low one."""
    found = re.search(rf"\b{name}=(\S+)", window)
    return int(found[1].split("x")[axis].split("_")[0]) if found else default


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


def _multiplied(instruction: Instruction, operands: _Arrays) -> str:
    """Returns the dtype of the wider operand, of float32 with the passes that the text asks for."""
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


def _opaque_flops(kernel: Instruction) -> float | None:
    """Returns the FLOPs of a custom call; None where they are not known."""
    if "cost_estimate" in kernel.rest and (estimated := kernel.attribute(r'"flops":"?(\d+)')):
        return float(estimated)
    if kernel.target.startswith("__cudnn$fmha"):
        return _fmha_flops(kernel)
    phase = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", kernel.name)
    arrays = [operand.results[0] for operand in kernel.operands if operand.results]
    if kernel.name.startswith("ragged-dot"):
        rows = [array for array in arrays if len(array.shape) > 1]
        return 2.0 * math.prod(rows[0].shape) * kernel.results[0].shape[-1] if rows else 0.0
    blocks = [array for array in arrays if len(array.shape) >= 3 and array.dtype in ("bf16", "f32")]
    if not phase or len(blocks) < 2:
        return None
    query, key = blocks[:2]
    outputs = [
        array for array in kernel.results if array.dtype == query.dtype and len(array.shape) >= 3
    ]
    width = outputs[0].shape[-1]
    keys = math.prod(key.shape[-2:]) // width  # either axis may be minor, as its block sizes say
    # The queries' gradient may be a third output.
    matmuls = {"fwd": 2, "dq": 3, "dkv": 2 + len(outputs)}[phase[1]]
    queries = math.prod(query.shape[-2:]) // width
    share = _share_of_pairs(kernel, phase[1], queries * keys)
    return 2.0 * matmuls * math.prod(query.shape) * keys * share


def _fmha_flops(kernel: Instruction) -> float:
    """Returns the FLOPs of cuDNN's attention, over the pairs that its mask leaves: two matmuls
    forward, five backward, which multiplies queries and keys again.
    """
    shape = kernel.attribute(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)')
    *batch, queries, keys = (int(size) for size in re.findall(r"\d+", shape))
    is_causal = "CAUSAL" in kernel.attribute(r'"mask_type":\s*"(\w+)"')
    window = int(kernel.attribute(r'"sliding_window_length":\s*"?(\d+)') or 0) or keys
    last = np.arange(1, queries + 1) if is_causal else np.full(queries, keys)
    pairs = int(np.minimum(last, min(window, keys)).sum())
    width = kernel.operands[0].results[0].shape[-1]
    matmuls = 5 if kernel.target.removesuffix("F8").endswith("Backward") else 2
    return 2.0 * matmuls * math.prod(batch) * pairs * width


def _share_of_pairs(kernel: Instruction, phase: str, pairs: int) -> float:
    """Returns the share of a head's pairs of queries and keys that splash attention multiplies:
    those of the blocks that its mask does not rule out as a whole.

    Its second operand has a number for each block: 0 for one that is skipped. All pairs count where
    that is no constant in the text, or there is no mask.
    """
    ending = "" if phase == "fwd" else f"_{phase}"
    sizes = [kernel.attribute(rf'block_{axis}{ending}\\?"+: (\d+)') for axis in ("q", "kv")]
    table = _constant(kernel.operands[1])
    if not all(sizes) or table is None or len(table.results[0].shape) != 3:
        return 1.0
    blocks = re.findall(r"-?\d+", table.literal)
    heads = table.results[0].shape[0]
    if len(blocks) != math.prod(table.results[0].shape):  # the text leaves the numbers out
        return 1.0
    ran = sum(block != "0" for block in blocks)
    return ran * math.prod(map(int, sizes)) / (heads * pairs)


def _constant(value: Instruction) -> Instruction | None:
    """Returns the constant that a value is, also where loops carry it; None if it is none."""
    made = value.before_moves()
    if made.opcode == "constant":
        return made
    if made.opcode != "get-tuple-element" or made.operands[0].opcode != "parameter":
        return None
    loop, root = made.computation.caller, made.computation.root
    if loop is None or loop.opcode != "while" or root.opcode != "tuple":
        return None
    kept, start = root.operands[made.index].before_moves(), loop.operands[0].before_moves()
    is_kept = kept.opcode == "get-tuple-element" and kept.index == made.index
    return _constant(start.operands[made.index]) if is_kept and start.opcode == "tuple" else None


# --------------------------------------------------------------------------------------------------
# Bytes
# --------------------------------------------------------------------------------------------------


def everywhere(arrays: _Arrays) -> float:
    """Returns the bytes of arrays."""
    return sum(array.bytes for array in arrays)


def off_chip(arrays: _Arrays) -> float:
    """Returns the bytes of the arrays that lie in no memory of the chip's own."""
    return sum(array.bytes for array in arrays if not array.on_chip)


def moved(instruction: Instruction, size: _Size = off_chip) -> float:
    """Returns the bytes that a kernel reads and writes; on-chip memory is free, but by
    `everywhere`.

    For an operand that is only sliced the slices count, for one that is updated in place the
    update.
    """
    operands, results = instruction.operands, produced(instruction)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _SLICES:
        sliced = min(size(operands[0].results), everywhere(results))
        return size(results) + sliced + size(arrays_of(operands[1:]))
    if opcode == "dynamic-update-slice":
        update = operands[1].results
        return size(update) + min(size(results), everywhere(update))
    if opcode == "fusion":
        parameters = instruction.fused.parameters
        read = sum(
            min(size(operand.results), _sliced(parameters[number]))
            for number, operand in enumerate(operands)
            if size(operand.results)
        )
        return read + _written(instruction.fused.root, results, size)
    if opcode == "custom-call" and instruction.target.startswith(("__cublas", "__cudnn")):
        results = [array for array in results if array.dtype not in ("s8", "u8")] or results
    return size(arrays_of(operands)) + size(results)


def produced(instruction: Instruction) -> _Arrays:
    """Returns the results of an instruction; for the start of an asynchronous one, the results of
    its end.

    The start's own results are its operands, the results and contexts; those of a copy begin with
    the copy.
    """
    opcode, results = instruction.opcode, instruction.results
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return results
    if opcode == "copy-start":
        return results[:1]
    results = results[len(arrays_of(instruction.operands)) :]
    while len(results) > 1 and results[-1].dtype in ("u32", "s32") and not results[-1].shape:
        results = results[:-1]
    return results


def _sliced(value: Instruction) -> float:
    """Returns the bytes read of an array that a fusion only slices or updates; else infinity."""
    users = [i for i in value.computation.instructions.values() if value in i.operands]
    return sum(_read_by(user, value) for user in users) if users else math.inf


def _read_by(user: Instruction, value: Instruction) -> float:
    """Returns the bytes that an instruction of a fusion reads of an array; infinity for all."""
    places = [number for number, operand in enumerate(user.operands) if operand is value]
    if user.opcode == "bitcast" and not user.is_root:
        return _sliced(user)
    if user.opcode == "fusion":
        return sum(_sliced(user.fused.parameters[number]) for number in places)
    if user.opcode in _SLICES and places == [0]:
        return everywhere(user.results)
    is_result = user.is_root or user in user.computation.root.operands
    is_update = user.opcode == "dynamic-update-slice" and places == [0]
    return 0.0 if is_update and is_result else math.inf


def _written(root: Instruction, results: _Arrays, size: _Size) -> float:
    """Returns the bytes that a fusion writes: of arrays updated in place only the updates."""
    if root.opcode == "tuple" and len(root.operands) == len(results):
        parts = zip(root.operands, results, strict=True)
        return sum(_written(part, (result,), size) for part, result in parts)
    if root.opcode == "bitcast":
        return _written(root.operands[0], results, size)
    if root.opcode == "fusion" and len(root.results) == len(results):
        return _written(root.fused.root, results, size)
    if root.opcode == "dynamic-update-slice":
        updated = root.operands[0]
        while updated.opcode == "bitcast":
            updated = updated.operands[0]
        if updated.opcode == "parameter":
            return min(size(results), everywhere(root.operands[1].results))
    return size(results)
