"""Codes of storage modes: the number in `MixedPrecisionState.mode`, which checkpoints keep."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.optim.storage_modes import STORAGE_MODES, MasterWeights, storage_mode

HALF_DTYPES = ("bfloat16", "float16")


def storage_code(dtypes: Iterable[DTypeLike], master_weights: MasterWeights) -> int:
    """Encodes the arrays that are stored beside params of these dtypes.

    The code is written in base 4: the lowest digit of the mode's code for bfloat16, that for
    float16, and so on with higher digits. Both are 0 without params of that dtype. Master weights
    of equal codes store the same: "auto" and "remainder" for bfloat16, "stochastic" and "none".
    """
    names = {np.dtype(dtype).name for dtype in dtypes}
    codes = [
        storage_mode(jnp.dtype(name), master_weights).code if name in names else 0
        for name in HALF_DTYPES
    ]
    total, weight = 0, 1
    while any(codes):
        for code in codes:
            total += code % 4 * weight
            weight *= 4
        codes = [code // 4 for code in codes]
    return total


def storage_text(code: int) -> str:
    """Spells a storage code out: ``remainder for bfloat16, full for float16``, ``nothing``.

    Codes that no mode has are spelled as ``an unknown storage (99)``.
    """
    names = {mode.code: mode.name for mode in STORAGE_MODES.values() if mode.code}
    codes = _mode_codes(code)
    if code < 0 or any(digit and digit not in names for digit in codes):
        return f"an unknown storage ({code})"
    pairs = zip(codes, HALF_DTYPES, strict=True)
    return ", ".join(f"{names[code]} for {name}" for code, name in pairs if code) or "nothing"


def _mode_codes(code: int) -> list[int]:
    """Takes a storage code apart into the code of one mode for each of `HALF_DTYPES`."""
    codes, weight = [0] * len(HALF_DTYPES), 1
    while code > 0:
        for place in range(len(codes)):
            codes[place] += code % 4 * weight
            code //= 4
        weight *= 4
    return codes
