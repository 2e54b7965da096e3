"""Moments of optax states in 16 or 8 bits: their fields and dtypes, rounding and widening."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from policy.core.arrays import varying_axes, working_dtype
from policy.core.dtypes import dtype_names, parse_dtype
from policy.optim.blockwise import (
    FLOAT8_POSITIVE,
    FLOAT8_SIGNED,
    FORMATS,
    INT8_POSITIVE,
    INT8_SIGNED,
    decode,
    encode,
)
from policy.optim.rounding import round_stochastically, round_to

FIRST_MOMENTS = ("mu", "m", "m1", "trace", "ema", "exp_avg")
"""Fields of optax's states that hold a running mean of gradients.

It forgets fast, and its noise exceeds an ulp of bfloat16.
"""

SMALLEST_SIZE, SMALLEST_WIDTH = 4096, 16
"""The fewest elements, and the shortest last axis, of a moment that is stored in 8 bits.

Smaller ones are stored in float32: they take little memory, and scales of short blocks much of it
(Dettmers et al. 2022 have the same 4096).
"""


def get_moment_dtypes(
    moment_dtype: DTypeLike | Mapping[str, DTypeLike] | None,
) -> dict[str, np.dtype] | None:
    """Parses `moment_dtype`.

    Args:
      moment_dtype: a dtype for every first moment, a mapping of field names to dtypes, or None.
        Names of dtypes are those that a Policy takes, "bf16", "f32", "half", and "int8" and
        "float8".

    Returns:
      Field names to dtypes, where "" stands for every first moment; or None. In 8 bits they are
      those of the codes, see `blockwise`: int8 and float8_e4m3fn for first moments, uint8 and
      float8_e5m2 for other fields.

    Raises:
      ValueError: a dtype is none of these, or float16 for a field that is no first moment.
    """
    if moment_dtype is None:
        return None
    asked = dict(moment_dtype) if isinstance(moment_dtype, Mapping) else {"": moment_dtype}
    return {name: _storage_dtype(name, dtype) for name, dtype in asked.items()}


_FORMS = (
    *(("int8", form) for form in (INT8_SIGNED, INT8_POSITIVE)),
    *(("float8", form) for form in (FLOAT8_SIGNED, FLOAT8_POSITIVE)),
    *((form.dtype.name, form) for form in FORMATS.values()),  # as read from a MixedPrecision
)
_FORMAT_OF = {(name, form.is_signed): form for name, form in _FORMS}


def _storage_dtype(name: str, asked: DTypeLike | None) -> np.dtype:
    is_first = name in ("", *FIRST_MOMENTS)
    kind = asked if asked is None or isinstance(asked, str) else jnp.dtype(asked).name
    form = _FORMAT_OF.get((str(kind), is_first))
    if form is not None:
        return form.dtype
    if kind is None or kind not in dtype_names() or parse_dtype(kind).itemsize > 4:
        raise ValueError(
            "moment_dtype should be bfloat16, float16, float32, 'int8' or 'float8', but got "
            f"{asked!r}."
        )
    if parse_dtype(kind) == jnp.float16 and not is_first:
        raise ValueError(
            f"moment_dtype for {name!r} is float16, in which the square of 256 overflows and the "
            "square of 1e-4 is 0: use bfloat16 or float32."
        )
    return parse_dtype(kind)


def has_codes(dtypes: Mapping[str, np.dtype] | None) -> bool:
    """Returns whether a field's dtype is one of codes in 8 bits."""
    return any(dtype in FORMATS for dtype in (dtypes or {}).values())


def moment_targets(
    inner: optax.OptState, params: optax.Params, dtypes: Mapping[str, np.dtype]
) -> list[np.dtype | None]:
    """Returns, for each leaf of an optax state, the dtype that it is stored in.

    None for leaves that are no moments, or too small for 8 bits, and stay as they are. Moments that
    are stored in 8 bits already are of any size: inside `jax.shard_map` they are parts of larger
    ones.
    """
    leaves, targets = jax.tree.leaves(inner), asked_dtypes(inner, params, dtypes)
    pairs = zip(leaves, targets, strict=True)
    return [dtype if dtype is None or _is_stored_in(x, dtype) else None for x, dtype in pairs]


def _is_stored_in(leaf: jax.Array, dtype: np.dtype) -> bool:
    if dtype not in FORMATS or leaf.dtype in FORMATS:
        return True
    return leaf.size >= SMALLEST_SIZE and leaf.shape[-1] >= SMALLEST_WIDTH


def asked_dtypes(
    inner: optax.OptState, params: optax.Params, dtypes: Mapping[str, np.dtype]
) -> list[np.dtype | None]:
    """Returns, for each leaf of an optax state, the dtype that is asked for its field, or None."""
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    targets: list[np.dtype | None] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner):
        name = field_of(path, suffixes)
        dtype = dtypes.get(name, dtypes.get("") if name in FIRST_MOMENTS else None)
        targets.append(dtype if is_moment(leaf) else None)
    return targets


def is_moment(leaf: Any) -> bool:
    """Returns whether a leaf of a state is a real floating array, or codes of one."""
    is_array = hasattr(leaf, "dtype")
    return is_array and (leaf.dtype in FORMATS or jnp.issubdtype(leaf.dtype, jnp.floating))


def field_of(path: KeyPath, suffixes: set[KeyPath]) -> str:
    """Returns the innermost field of a state that a leaf lies in.

    Fields of the params themselves don't count: the paths of params are `suffixes`.
    """
    cut = next((i for i in range(len(path) + 1) if path[i:] in suffixes), len(path))
    names = [key.name for key in path[:cut] if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else ""


class StoredInner(NamedTuple):
    """The state of an inner transform, with moments as they are stored.

    Attributes:
      state: the transform's own state; moments in 8 bits are codes of their shapes.
      scales: a tree like the state, of the scales of 8-bit moments, and an empty
        `optax.MaskedNode` for every other leaf; or one such node if no moment may be in 8 bits.
    """

    state: optax.OptState
    scales: Any


def widen_moments(stored: StoredInner, targets: list[np.dtype | None]) -> optax.OptState:
    """Returns a state whose moments are float32, in which the inner transform computes."""
    leaves, tree = jax.tree.flatten(stored.state)
    each = zip(leaves, scales_of(stored), targets, strict=True)
    return tree.unflatten(x if t is None else _widen(x, s) for x, s, t in each)


def scales_of(stored: StoredInner) -> list[Any]:
    """Returns, for each leaf of the state, its scales or an empty `optax.MaskedNode`."""
    leaves, tree = jax.tree.flatten(stored.state)
    if isinstance(stored.scales, optax.MaskedNode):
        return [optax.MaskedNode()] * len(leaves)
    return tree.flatten_up_to(stored.scales)


def _widen(x: jax.Array, scales: Any) -> jax.Array:
    form = FORMATS.get(np.dtype(x.dtype))
    return x.astype(working_dtype(x.dtype)) if form is None else decode(x, scales, form)


def narrow_moments(
    inner: optax.OptState,
    targets: list[np.dtype | None],
    keys: list[jax.Array | None] | None = None,
    like: StoredInner | None = None,
    *,
    with_scales: bool,
) -> StoredInner:
    """Rounds the moments of a state to the dtypes that they are stored in.

    A finite moment beyond float16 becomes its largest number: an infinite one would stay for good.

    Args:
      inner: a state of an optax transform.
      targets: see `moment_targets`.
      keys: PRNG keys of stochastic rounding, one for each leaf; None rounds to nearest.
      like: the state before. Leaves without a target keep their scales, and where devices that
        hold different parts of a moment share a scale, they compute it together again.
      with_scales: True if a moment may be in 8 bits.
    """
    leaves, tree = jax.tree.flatten(inner)
    draws: list[jax.Array | None] = keys or [None] * len(leaves)
    before = [optax.MaskedNode()] * len(leaves) if like is None else scales_of(like)
    each = zip(leaves, targets, draws, before, strict=True)
    pairs = [(x, old) if t is None else _narrow(x, t, key, old) for x, t, key, old in each]
    scales = tree.unflatten(s for _, s in pairs) if with_scales else optax.MaskedNode()
    return StoredInner(tree.unflatten(x for x, _ in pairs), scales)


def _narrow(x: jax.Array, dtype: np.dtype, key: jax.Array | None, before: Any) -> tuple[Any, Any]:
    form = FORMATS.get(dtype)
    if form is not None:
        is_new = isinstance(before, optax.MaskedNode)
        shared = frozenset() if is_new else varying_axes(x) - varying_axes(before)
        return encode(x.astype(jnp.float32), form, key, tuple(sorted(shared, key=str)))
    if dtype.itemsize >= 4:
        return x.astype(dtype), optax.MaskedNode()
    largest = np.float32(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    rounded = round_to(x, dtype) if key is None else round_stochastically(x, dtype, key)
    return rounded, optax.MaskedNode()
