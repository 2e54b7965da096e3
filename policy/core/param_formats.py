"""Formats of parameters stored in 8 and 4 bits: codes, and a scale for each block of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.core.dtypes import dtype_names, dtype_or_none
from policy.core.quantization import Codec, codec_of

# Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv:2305.14314), appendix E:
# quantiles of a normal distribution, between -1 and 1, with an exact zero.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


CODES = {
    "int8": codec_of(np.dtype(jnp.int8)),
    "float8": codec_of(np.dtype(jnp.float8_e4m3fn)),
    "int4": Codec(jnp.int4, -8, 7, block=32),
    "uint4": Codec(jnp.uint4, 0, 15, block=32, has_minimum=True),
    "nf4": Codec(jnp.uint4, -1, 1, table=NF4, block=64),
}
_OF_DTYPE = {jnp.dtype(kind.dtype): name for name, kind in CODES.items() if kind.table is None}


@dataclasses.dataclass(frozen=True)
class ParamFormat:
    """The 8- or 4-bit format of parameters: the kind of codes, and the size of their blocks.

    >>> from policy.core.param_formats import format_of
    >>> format_of("int4")
    ParamFormat(name='int4', block=32)

    Attributes:
      name: ``int8``, ``float8`` (e4m3fn), ``int4``, ``uint4`` (counted from a block's minimum), or
        ``nf4`` (16 quantiles of a normal distribution).
      block: the number of consecutive codes along the contracted axis that share a scale; None for
        one scale along the whole axis.
    """

    name: str
    block: int | None = None

    @property
    def text(self) -> str:
        """The text form, as in ``params=int4:32``."""
        return self.name if self.block is None else f"{self.name}:{self.block}"


_TEXTS = [ParamFormat(name, kind.block).text for name, kind in CODES.items()]


def format_of(value: Any) -> ParamFormat | None:
    """Returns the format of a text such as ``int4:32`` or of an 8-bit dtype; None of other values.

    Raises:
      ValueError: the size of a block is not a positive even number, or a text names no dtype.
    """
    if isinstance(value, ParamFormat):
        return value
    if not isinstance(value, str):
        dtype = dtype_or_none(value)
        name = None if dtype is None else _OF_DTYPE.get(dtype)
        return None if name is None else ParamFormat(name, CODES[name].block)
    name, colon, block = value.partition(":")
    name = {"i8": "int8", "f8": "float8", "i4": "int4"}.get(name, name)
    if name not in CODES:
        dtype = dtype_or_none(value)
        is_dtype = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        if value in dtype_names() or is_dtype:
            return None
        raise ValueError(
            f"Unknown format {value!r}: it should be one of {', '.join(_TEXTS)}, "
            "where another size of a block may follow the colon, as in int8:32, or a floating "
            f"dtype: {', '.join(dtype_names())}."
        )
    if not colon:
        return ParamFormat(name, CODES[name].block)
    if not (block.isascii() and block.isdigit()) or int(block) < 2 or int(block) % 2:
        raise ValueError(
            f"params={value}: the size of a block should be a positive even number, as in "
            f"{name}:32, but got {block!r}."
        )
    return ParamFormat(name, int(block))
