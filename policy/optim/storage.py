"""Storage of one param's float32 value: the state beside the param, and how the two become one number again.

| kind | beside a half-precision param | the float32 value |
|---|---|---|
| full | the float32 master | the master |
| remainder | the low 16 bits of the master, uint16 | param as the high half, joined with the low one |
| kahan | what rounding dropped, in the param's dtype | param + what was dropped |
| stochastic, none | nothing | the param |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from policy.optim.rounding import halves, join, pack, packed, round_stochastically, round_to, split
from policy.trees import working_dtype

MasterWeights: TypeAlias = Literal["auto", "full", "remainder", "kahan", "stochastic", "none"]
MASTER_WEIGHTS: tuple[MasterWeights, ...] = ("auto", "full", "remainder", "kahan", "stochastic", "none")
Kind: TypeAlias = Literal["full", "remainder", "kahan", "stochastic", "none"]

PACKED: tuple[Kind, ...] = ("remainder", "kahan")
"""The kinds whose two arrays of 16 bits leave a step as one of 32."""


def kind_of(dtype: Any, master_weights: MasterWeights) -> Kind:
    """Returns the kind of storage for a param of `dtype`. Float32 and wider is its own master, in every mode."""
    if np.dtype(dtype).itemsize >= 4:
        return "none"
    if master_weights == "auto":
        return "remainder" if dtype == jnp.bfloat16 else "full"
    return master_weights


_CODED: tuple[Kind, ...] = ("full", "remainder", "kahan")
_HALF = ("bfloat16", "float16")


def storage_code(dtypes: Iterable[Any], master_weights: MasterWeights) -> int:
    """Encodes what is kept beside params of these dtypes: a base-4 digit for bfloat16, and one for float16.

    Each digit is 0 where nothing is kept, and 1, 2 or 3 for "full", "remainder" and "kahan". Two modes of equal codes
    store the same: "auto" and "remainder" for bfloat16, "stochastic" and "none".
    """
    names = {np.dtype(dtype).name for dtype in dtypes}
    kinds = [kind_of(jnp.dtype(name), master_weights) if name in names else "none" for name in _HALF]
    digits = [_CODED.index(kind) + 1 if kind in _CODED else 0 for kind in kinds]
    return sum(digit * 4**place for place, digit in enumerate(digits))


def storage_text(code: int) -> str:
    """Spells a storage code out: ``remainder beside bfloat16, full beside float16``, or ``nothing``."""
    digits = [(code // 4**place) % 4 for place in range(len(_HALF))]
    if not 0 <= code < 4 ** len(_HALF):
        return f"an unknown storage ({code})"
    parts = [f"{_CODED[d - 1]} beside {name}" for d, name in zip(digits, _HALF, strict=True) if d]
    return ", ".join(parts) or "nothing"


def kept_dtype(dtype: Any, kind: Kind) -> np.dtype | None:
    """Returns the dtype of the state beside a param of `dtype`, or None where nothing is kept."""
    if kind == "full":
        return np.dtype("float32")
    if kind == "remainder":
        return np.dtype("uint16")
    return np.dtype(dtype) if kind == "kahan" else None


def beside(param: jax.Array, kind: Kind) -> Any:
    """Makes the state beside a param that is its own float32 value, from the param, so that it is sharded alike."""
    if kind == "full":
        return param.astype(jnp.float32)
    if kind == "remainder":
        return jnp.zeros_like(param, jnp.uint16)
    if kind == "kahan":
        return jnp.zeros_like(param)
    return optax.MaskedNode()


def widen_leaf(param: jax.Array, kept: Any, kind: Kind) -> jax.Array:
    """The value that the inner transform sees: float32, or what is wider. Never NaN where the param is finite."""
    if kind == "full":
        return kept
    wide = param.astype(working_dtype(param.dtype))
    if kind == "remainder":
        return join(param, kept)
    if kind == "kahan":
        dropped = kept.astype(wide.dtype)
        # What doesn't round to the param any more is stale. A little short: `kept` may have been rounded up to a tie.
        fresh = round_to(wide + dropped * np.float32(1 - 2.0**-8), param.dtype) == param
        return jnp.where(fresh, wide + dropped, wide)
    return wide


def hold(wide: jax.Array, dtype: Any, kind: Kind, key: Any = None) -> Any:
    """A new float32 value as a step hands it on; `release` makes of it the param, and what is kept beside that.

    Stochastic rounding draws from `key`. Two arrays of 16 bits travel as one of 32: XLA
    would compute each in a pass of its own over the moments.
    """
    if kind == "full":
        return round_to(wide, dtype), wide
    if kind == "remainder":
        return pack(wide)
    if kind == "kahan":
        param = round_to(wide, dtype)
        dropped = wide - param.astype(wide.dtype)
        return _pair(param, jnp.where(jnp.isfinite(dropped), dropped, jnp.zeros_like(dropped)).astype(dtype))
    if kind == "stochastic":
        return round_stochastically(wide, dtype, key)
    return round_to(wide, dtype)


def hold_same(param: jax.Array, kept: Any, kind: Kind) -> Any:
    """Returns the result of `hold` for a step that changes nothing."""
    if kind == "full":
        return param, kept
    if kind == "remainder":
        return packed(param, kept)
    return _pair(param, kept) if kind == "kahan" else param


def release(held: Any, dtype: Any, kind: Kind) -> tuple[jax.Array, Any]:
    """The param, and what is kept beside it."""
    if kind == "full":
        return held
    if kind == "remainder":
        return split(held)
    if kind == "kahan":
        param, dropped = halves(held, dtype)
        return param, lax.bitcast_convert_type(dropped, dtype)
    return held, optax.MaskedNode()


def _pair(high: jax.Array, low: jax.Array) -> jax.Array:
    """Two arrays of 16 bits as one of 32."""
    bits = [lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (high, low)]
    return (bits[0] << jnp.uint32(16)) | bits[1]
