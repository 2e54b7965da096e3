"""Parameters in 8 and 4 bits as plain arrays, for files: two codes of 4 bits in a byte."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.core.arrays import is_quantized, path_name

_FOUR_BITS = jnp.int4, jnp.uint4


def pack_params(tree: Any) -> Any:
    """Returns a tree with a dict of plain arrays for each `QuantizedArray`, as files hold them.

    The dict has ``codes`` and ``scales``. Codes of 4 bits are uint8: two neighbours along the
    quantised axis in a byte, the first of them in its lower half. float8 is uint8 bit for bit:
    safetensors' reader for Flax has none.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantize_params({"kernel": jnp.ones((64, 8))}, "params=nf4")
    >>> packed = policy.pack_params(stored)["kernel"]
    >>> packed["codes"].shape, packed["codes"].dtype, packed["scales"].dtype
    ((1, 32, 8), dtype('uint8'), dtype(bfloat16))

    Args:
      tree: any, such as parameters or an `nnx.State`. Arrays may be `jax.ShapeDtypeStruct`.
    """

    def packed(x: Any) -> Any:
        if not is_quantized(x):
            return x
        pack = functools.partial(_packed, axis=x.layout.shared)
        return {"codes": jax.tree.map(pack, x.codes), "scales": x.scales}

    return jax.tree.map(packed, tree, is_leaf=is_quantized)


def unpack_params(packed: Any, like: Any) -> Any:
    """Returns the tree that `pack_params` made `packed` of, bit for bit.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantize_params({"kernel": jnp.ones((64, 8))}, "params=nf4")
    >>> like = jax.eval_shape(lambda: stored)
    >>> policy.unpack_params(policy.pack_params(stored), like)["kernel"]
    QuantizedArray('nf4:64', (64, 8), float32)

    Args:
      packed: the tree, as it was restored.
      like: a tree of the same structure, with `QuantizedArray`s of the same formats and shapes,
        such as ``jax.eval_shape`` of `quantize_params`.

    Raises:
      ValueError: codes of another shape or dtype.
    """

    def unpacked(path: Any, x: Any, stored: Any) -> Any:
        if not is_quantized(x):
            return stored
        restore = functools.partial(_unpacked, layout=x.layout, path=path_name(path))
        codes = jax.tree.map(restore, x.codes, stored["codes"])
        scales = jax.tree.map(jnp.asarray, stored["scales"])
        return dataclasses.replace(x, codes=codes, scales=scales)

    return jax.tree_util.tree_map_with_path(unpacked, like, packed, is_leaf=is_quantized)


def _packed(codes: Any, axis: int) -> Any:
    if codes.dtype == jnp.int8:
        return codes
    pack = functools.partial(_in_bytes, axis=axis)
    return jax.eval_shape(pack, codes) if isinstance(codes, jax.ShapeDtypeStruct) else pack(codes)


def _unpacked(like: Any, stored: Any, layout: Any, path: str) -> jax.Array:
    wanted = _packed(jax.ShapeDtypeStruct(like.shape, like.dtype), layout.shared)
    if (stored.shape, stored.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError(
            f"The codes of parameter '{path}' in {layout.name} should be {wanted.dtype}"
            f"{wanted.shape}, but got {stored.dtype}{stored.shape}: restore them into parameters "
            "that were quantised with the same policy."
        )
    stored = jnp.asarray(stored)
    if like.dtype not in _FOUR_BITS:
        return lax.bitcast_convert_type(stored, like.dtype)
    return _in_halves(stored, layout.shared, np.dtype(like.dtype))


@functools.partial(jax.jit, static_argnames="axis")
def _in_bytes(codes: jax.Array, axis: int) -> jax.Array:
    if codes.dtype not in _FOUR_BITS:
        return lax.bitcast_convert_type(codes, jnp.uint8)
    bits = codes.astype(jnp.int8).astype(jnp.uint8) & 15
    low, high = (lax.slice_in_dim(bits, i, None, 2, axis) for i in (0, 1))
    return low | high << 4


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_halves(packed: jax.Array, axis: int, dtype: np.dtype) -> jax.Array:
    bits = jnp.stack([packed & 15, packed >> 4], axis).astype(jnp.int8)
    bits = bits.reshape(*packed.shape[:axis], -1, *packed.shape[packed.ndim + axis + 1 :])
    return ((bits ^ 8) - 8 if dtype == jnp.int4 else bits).astype(dtype)
