"""Parameters and caches stored in 8 and 4 bits."""

from policy.core.dtypes import ScaledMatmul as ScaledMatmul
from policy.eight_bits.caches import quantize_cache as quantize_cache
from policy.quantized.array import QuantizedArray as QuantizedArray
from policy.quantized.packing import pack_params as pack_params
from policy.quantized.packing import unpack_params as unpack_params
from policy.quantized.params import dequantize_params as dequantize_params
from policy.quantized.params import merge_frozen as merge_frozen
from policy.quantized.params import quantize_params as quantize_params
from policy.quantized.params import split_frozen as split_frozen

__all__ = [
    "QuantizedArray",
    "ScaledMatmul",
    "dequantize_params",
    "merge_frozen",
    "pack_params",
    "quantize_cache",
    "quantize_params",
    "split_frozen",
    "unpack_params",
]


def __dir__() -> list[str]:
    return list(__all__)
