"""Parameters in 8 and 4 bits as plain arrays, for files: two codes of 4 bits in a byte."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.core.arrays import is_quantized, path_name

_FOUR_BITS = jnp.int4, jnp.uint4
_KEYS = {"codes", "scales", "format"}
_WIDTH = 64  # texts of the same size: readers into arrays of given shapes take another format's


def pack_params(tree: Any) -> Any:
    """Returns a tree with a dict of plain arrays for each `QuantizedArray`, as files hold them.

    The dict has ``codes``, ``scales`` and ``format``: format, axis and sizes as a text in uint8, by
    which `unpack_params` rejects the files of others. Codes of 4 bits are uint8: two neighbours
    along the quantised axis in a byte, the first of them in its lower half. float8 is uint8 bit for
    bit: safetensors' reader for Flax has none.

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
        x.checked_parts()
        pack = functools.partial(_packed, axis=x.layout.shared)
        text = np.frombuffer(x.layout.text.ljust(_WIDTH).encode(), np.uint8)
        return {"codes": jax.tree.map(pack, x.codes), "scales": x.scales, "format": text}

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
      ValueError: another format, axis, shape or dtype, or no dict of `pack_params`.
    """

    def unpacked(path: Any, x: Any, stored: Any) -> Any:
        name = path_name(path)
        keys = set(stored) if isinstance(stored, Mapping) else None
        if keys != (_KEYS if is_quantized(x) else None):
            found = f"a dict of {', '.join(map(str, stored))}" if keys else type(stored).__name__
            wanted = f"of {x.layout.text}" if is_quantized(x) else "in no format of 8 or 4 bits"
            raise ValueError(
                f"Parameter '{name}', {wanted}, can't be restored from {found}: save what "
                "policy.pack_params returns, and restore it into parameters of the same formats."
            )
        if not is_quantized(x):
            return stored
        if not isinstance(stored["format"], jax.core.Tracer):
            text = bytes(np.asarray(stored["format"], np.uint8)).decode().rstrip()
            if text != x.layout.text:
                raise ValueError(
                    f"Parameter '{name}' was saved as {text}, and can't be restored into "
                    f"{x.layout.text}: restore it into parameters that were quantized with the "
                    "same policy, then dequantize_params and quantize_params with the other one."
                )
        require = functools.partial(_require, text=f"parameter '{name}' in {x.layout.format.text}")
        restore = functools.partial(_unpacked, axis=x.layout.shared, require=require)
        codes = jax.tree.map(restore, x.codes, stored["codes"])
        scales = jax.tree.map(functools.partial(require, "scales"), x.scales, stored["scales"])
        return dataclasses.replace(x, codes=codes, scales=scales)

    return jax.tree_util.tree_map_with_path(unpacked, like, packed, is_leaf=is_quantized)


def _packed(codes: Any, axis: int) -> Any:
    if codes.dtype == jnp.int8:
        return codes
    pack = functools.partial(_in_bytes, axis=axis)
    return jax.eval_shape(pack, codes) if isinstance(codes, jax.ShapeDtypeStruct) else pack(codes)


def _require(what: str, like: Any, stored: Any, text: str) -> jax.Array:
    if (stored.shape, stored.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"The {what} of {text} should be {like.dtype}{like.shape}, but got "
            f"{stored.dtype}{stored.shape}: restore them into parameters that were quantized with "
            "the same policy."
        )
    return jnp.asarray(stored)


def _unpacked(like: Any, stored: Any, axis: int, require: Any) -> jax.Array:
    wanted = _packed(jax.ShapeDtypeStruct(like.shape, like.dtype), axis)
    stored = require("codes", wanted, stored)
    if like.dtype not in _FOUR_BITS:
        return lax.bitcast_convert_type(stored, like.dtype)
    return _in_halves(stored, axis, np.dtype(like.dtype))


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
