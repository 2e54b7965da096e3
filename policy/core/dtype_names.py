"""Names of dtypes in texts, and the backend's 16-bit float."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from policy.core.casting import cast_floating
from policy.core.matmul_dtypes import backend

T = TypeVar("T")

# Every name in the text form, by dtype; `str(policy)` prints the first one.
dtype_to_names: dict[Any, tuple[str, ...]] = {
    jnp.bfloat16: ("bfloat16", "bf16"),
    jnp.float16: ("float16", "f16"),
    jnp.float32: ("float32", "f32", "full"),
    jnp.float64: ("float64", "f64"),
}
_name_to_dtype = {
    name: jnp.dtype(dtype) for dtype, names in dtype_to_names.items() for name in names
}

_EIGHT_BITS = re.compile(r"(u?int8|float8|fp8|f8|i8)")


def half_dtype() -> np.dtype:
    """Returns the backend's 16-bit float, as in jmp: bfloat16 on TPU, float16 elsewhere.

    >>> import policy
    >>> policy.half_dtype().itemsize
    2
    """
    return jnp.dtype(jnp.bfloat16 if backend()[0] == "tpu" else jnp.float16)


def cast_to_full(tree: T) -> T:
    """Casts the floating arrays of a tree to float32.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.cast_to_full({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
    dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating arrays of a tree to `half_dtype()`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.cast_to_half(jnp.ones(2)).dtype == policy.half_dtype()
    True
    """
    return cast_floating(tree, half_dtype())


def dtype_names() -> tuple[str, ...]:
    """Returns every name of a dtype that a policy takes."""
    return ("half", *_name_to_dtype)


def parse_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name such as ``bf16``, ``float32``, ``full`` or ``half``.

    Raises:
      ValueError: no dtype that a policy takes has this name.
    """
    if name == "half":
        return half_dtype()
    try:
        return _name_to_dtype[name]
    except KeyError:
        known = ", ".join(dtype_names())
        hint = " Matmuls in 8 bits are m=f8 and m=i8." if _EIGHT_BITS.match(name) else ""
        raise ValueError(f"Unknown dtype '{name}': it should be one of {known}.{hint}") from None
