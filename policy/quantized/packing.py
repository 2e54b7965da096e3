"""Parameters in 8 and 4 bits as plain arrays, for files: two codes of 4 bits in a byte."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.core.arrays import is_quantized, path_name
from policy.core.messages import dtype_and_shape

_FOUR_BITS = jnp.int4, jnp.uint4


def pack_params(tree: Any) -> Any:
    """Returns a tree with a dict of plain arrays for each `QuantizedArray`, as files hold them.

    The dict has ``scales``, and quantized values by the name of their format, so that they fit no
    other. Those of 4 bits are uint8: two neighbors along the quantized axis in a byte, the first
    of them in its lower half.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantized.quantize_params({"kernel": jnp.ones((64, 8))}, "params=nf4")
    >>> packed = policy.quantized.pack_params(stored)["kernel"]
    >>> packed["nf4"].shape, packed["nf4"].dtype, packed["scales"].dtype
    ((1, 32, 8), dtype('uint8'), dtype(bfloat16))

    Args:
      tree: any, such as parameters or an `nnx.State`. Arrays may be `jax.ShapeDtypeStruct`.
    """
    return jax.tree.map(lambda x: _packed(x) if is_quantized(x) else x, tree, is_leaf=is_quantized)


def unpack_params(packed: Any, like: Any) -> Any:
    """Returns the tree that `pack_params` made `packed` of, bit for bit.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantized.quantize_params({"kernel": jnp.ones((64, 8))}, "params=nf4")
    >>> like = jax.eval_shape(lambda: stored)
    >>> policy.quantized.unpack_params(policy.quantized.pack_params(stored), like)["kernel"]
    QuantizedArray('nf4:64', (64, 8), float32)

    Args:
      packed: the tree, as it was restored.
      like: a tree of the same structure, with `QuantizedArray`s of the same formats and shapes,
        such as ``jax.eval_shape`` of `quantize_params`.

    Raises:
      ValueError: a parameter was saved in another format, axis, shape or dtype.
    """

    def unpacked(path: Any, x: Any, stored: Any) -> Any:
        if not is_quantized(x) and not isinstance(stored, Mapping):
            return stored
        wanted = jax.eval_shape(_packed, x) if is_quantized(x) else x
        if _text(stored) != _text(wanted):
            held = f" in {x.layout.text}" if is_quantized(x) else ""
            raise ValueError(
                f"Parameter '{path_name(path)}'{held} should be {_text(wanted)}, but was saved as "
                f"{_text(stored)}: restore it into parameters that were quantized with the same "
                "policy, then dequantize_params and quantize_params with the other one."
            )
        restore = functools.partial(_unpacked, axis=x.layout.shared)
        codes = jax.tree.map(restore, x.codes, stored[x.format.name])
        scales = jax.tree.map(jnp.asarray, stored["scales"])
        return dataclasses.replace(x, codes=codes, scales=scales)

    return jax.tree_util.tree_map_with_path(unpacked, like, packed, is_leaf=is_quantized)


def _text(stored: Any) -> str:
    """Returns the names, dtypes and shapes of plain arrays, for comparison and messages."""
    named = stored.items() if isinstance(stored, Mapping) else [("", stored)]
    texts = [f"{name} {dtype_and_shape(leaf)}" for name, x in named for leaf in jax.tree.leaves(x)]
    return ", ".join(sorted(texts)).strip()


def _packed(x: Any) -> dict[str, Any]:
    x.checked_parts()
    pack = functools.partial(_in_bytes, axis=x.layout.shared)

    def plain(codes: Any) -> Any:
        if codes.dtype not in _FOUR_BITS:
            return codes
        is_shape = isinstance(codes, jax.ShapeDtypeStruct)
        return jax.eval_shape(pack, codes) if is_shape else pack(codes)

    return {x.format.name: jax.tree.map(plain, x.codes), "scales": x.scales}


def _unpacked(like: Any, stored: Any, axis: int) -> jax.Array:
    codes = jnp.asarray(stored)
    return _in_halves(codes, axis, np.dtype(like.dtype)) if like.dtype in _FOUR_BITS else codes


@functools.partial(jax.jit, static_argnames="axis")
def _in_bytes(codes: jax.Array, axis: int) -> jax.Array:
    pairs = [lax.slice_in_dim(codes, i, None, 2, axis) for i in (0, 1)]
    return lax.bitcast_convert_type(jnp.stack(pairs, -1), jnp.uint8)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_halves(packed: jax.Array, axis: int, dtype: np.dtype) -> jax.Array:
    shape = list(packed.shape)
    shape[axis] *= 2
    return jnp.moveaxis(lax.bitcast_convert_type(packed, dtype), -1, axis).reshape(shape)
