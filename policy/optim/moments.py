"""Moments of optax states, stored in half precision and computed in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from policy.optim.rounding import round_stochastically, round_to
from policy.policy import dtype_names, parse_dtype
from policy.trees import shortened, working_dtype

FIRST_MOMENTS = ("mu", "m", "m1", "trace", "ema", "exp_avg")
"""Fields of optax's states that hold a running mean of gradients.

It forgets fast, and its noise exceeds an ulp of bfloat16.
"""

LARGEST_RETENTION = 0.98
"""The largest decay rate at which a bfloat16 mean that is rounded to nearest converges.

At .99 it stops at 0.8 of the true value, at .999 at once.
"""

_PROBE_PARAM, _PROBE_VALUE, _PROBE_STEPS = 1.2345, 0.75, 64


def get_moment_dtypes(
    moment_dtype: DTypeLike | Mapping[str, DTypeLike] | None,
) -> dict[str, np.dtype] | None:
    """Parses `moment_dtype`.

    Args:
      moment_dtype: a dtype for every first moment, a mapping of field names to dtypes, or None.
        Names of dtypes are those that a Policy takes: "bf16", "f32", "half".

    Returns:
      Field names to dtypes, where "" stands for every first moment; or None.

    Raises:
      ValueError: a dtype is none of bfloat16, float16 and float32, or float16 for a field that is
        no first moment.
    """
    if moment_dtype is None:
        return None
    asked = dict(moment_dtype) if isinstance(moment_dtype, Mapping) else {"": moment_dtype}
    dtypes = {name: _storage_dtype(dtype) for name, dtype in asked.items()}
    for name, dtype in dtypes.items():
        if dtype == jnp.float16 and name not in ("", *FIRST_MOMENTS):
            raise ValueError(
                f"moment_dtype for {name!r} is float16, in which a square of 256 overflows and one "
                "of 1e-4 is 0: use bfloat16 or float32."
            )
    return dtypes


def _storage_dtype(asked: DTypeLike | None) -> np.dtype:
    dtype = None
    with contextlib.suppress(TypeError):
        if isinstance(asked, str) and asked in dtype_names():
            dtype = parse_dtype(asked)
        elif asked is not None:
            dtype = np.dtype(jnp.dtype(asked))
    if dtype is None or dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"moment_dtype should be bfloat16, float16 or float32, but got {dtype or repr(asked)}."
        )
    return dtype


def moment_targets(
    inner: optax.OptState, params: optax.Params, dtypes: Mapping[str, np.dtype]
) -> list[np.dtype | None]:
    """Returns, for each leaf of an optax state, the dtype that it is stored in.

    None for leaves that are no moments and stay as they are.
    """
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    targets: list[np.dtype | None] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner):
        name = _field(path, suffixes)
        dtype = dtypes.get(name, dtypes.get("") if name in FIRST_MOMENTS else None)
        is_real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        targets.append(dtype if is_real else None)
    return targets


def _field(path: KeyPath, suffixes: set[KeyPath]) -> str:
    """Returns the innermost field of a state that a leaf lies in.

    Fields of the params themselves don't count: the paths of params are `suffixes`.
    """
    cut = next((i for i in range(len(path) + 1) if path[i:] in suffixes), len(path))
    names = [key.name for key in path[:cut] if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else ""


def widen_moments(inner: optax.OptState, targets: list[np.dtype | None]) -> optax.OptState:
    """Casts the moments of a state to float32, in which the inner transform computes."""
    leaves, tree = jax.tree.flatten(inner)
    each = zip(leaves, targets, strict=True)
    return tree.unflatten(x if t is None else x.astype(working_dtype(x.dtype)) for x, t in each)


def narrow_moments(
    inner: optax.OptState,
    targets: list[np.dtype | None],
    keys: list[jax.Array | None] | None = None,
) -> optax.OptState:
    """Rounds the moments of a state to the dtypes that they are stored in.

    A finite moment beyond float16 becomes its largest number: an infinite one would stay for good.

    Args:
      inner: a state of an optax transform.
      targets: see `moment_targets`.
      keys: PRNG keys of stochastic rounding, one for each leaf; None rounds to nearest.
    """
    leaves, tree = jax.tree.flatten(inner)
    draws: list[jax.Array | None] = keys or [None] * len(leaves)
    each = zip(leaves, targets, draws, strict=True)
    return jax.tree.unflatten(tree, [x if t is None else _narrow(x, t, key) for x, t, key in each])


def _narrow(x: jax.Array, dtype: np.dtype, key: jax.Array | None) -> jax.Array:
    if dtype.itemsize >= 4:
        return x.astype(dtype)
    largest = np.float32(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return round_to(x, dtype) if key is None else round_stochastically(x, dtype, key)


def check_moments(
    tx: optax.GradientTransformationExtraArgs,
    inner: optax.OptState,
    params: optax.Params,
    dtypes: Mapping[str, np.dtype],
    stochastic: bool,
) -> None:
    """Refuses moments that can't be stored as asked.

    A step of gradients of 0, on params of one element, tells a field's decay rate; it is taken at
    counts 1 and 1e5.

    Args:
      tx: the transform.
      inner: a state that it made for `params`.
      params: a tree of arrays.
      dtypes: see `get_moment_dtypes`.
      stochastic: True if moments are rounded stochastically.

    Raises:
      ValueError: a name matches no field of the state; a field is a copy of the params or a running
        sum; or a mean of squares is to be bfloat16, decays to more than .98 of itself, and is not
        rounded stochastically.
    """
    if not jax.tree.leaves(params):
        return
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    fields = [_field(path, suffixes) for path, _ in jax.tree_util.tree_leaves_with_path(inner)]
    targets = moment_targets(inner, params, dtypes)
    found = {name for name, target in zip(fields, targets, strict=True) if target}
    seen = shortened(sorted({name for name in fields if name})) or "none"
    for name in dtypes:
        if not found if name == "" else name not in found:
            asked = "a first moment" if name == "" else repr(name)
            raise ValueError(
                f"moment_dtype matched nothing: the state of tx has no field {asked}. Its fields: "
                f"{seen}."
            )
    default = dtypes.get("", np.dtype("float32"))
    for name in sorted(name for name in found if dtypes.get(name, default).itemsize < 4):
        _check_field(tx, params, name, name in FIRST_MOMENTS, stochastic)


def _check_field(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    name: str,
    is_first: bool,
    stochastic: bool,
) -> None:
    try:
        with jax.ensure_compile_time_eval():
            is_copy, kept = _probe(tx, params, name)
    except Exception as error:
        if is_first:  # a transform that needs more arguments: the field's name is trusted
            return
        raise ValueError(
            f"moment_dtype for {name!r} can't be checked: a step on params of one element failed "
            f"({error}). Leave it float32."
        ) from error
    if is_copy:
        raise ValueError(
            f"moment_dtype for {name!r} is refused: it is a copy of the params. Leave it float32."
        )
    if kept >= 1 - 2.0**-22:
        raise ValueError(
            f"moment_dtype for {name!r} is refused: it is a running sum. Leave it float32."
        )
    if not (is_first or stochastic) and kept > LARGEST_RETENTION:
        raise ValueError(
            f"moment_dtype for {name!r} is bfloat16, but a step keeps {kept:.6g} of it, and above "
            f"{LARGEST_RETENTION} rounding to nearest keeps all: leave it float32, or pass key= "
            "for stochastic rounding."
        )


def _probe(
    tx: optax.GradientTransformationExtraArgs, params: optax.Params, name: str
) -> tuple[bool, float]:
    """Returns whether a field starts as the params, and the largest share of it that is kept."""
    small = jax.tree.map(lambda p: jnp.full((1,) * p.ndim, _PROBE_PARAM, jnp.float32), params)
    zero = jax.tree.map(jnp.zeros_like, small)
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(small)}
    fresh = tx.init(small)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(fresh)]
    is_field = [_field(path, suffixes) == name for path in paths]
    start = [x for x, mine in zip(jax.tree.leaves(fresh), is_field, strict=True) if mine]
    if all(bool(jnp.all(x == np.float32(_PROBE_PARAM))) for x in start):
        return True, 1.0
    return False, max(_kept(tx, fresh, is_field, small, zero, count) for count in (1, 10**5))


def _kept(
    tx: optax.GradientTransformationExtraArgs,
    state: optax.OptState,
    is_field: list[bool],
    params: optax.Params,
    zero: optax.Updates,
    count: int,
) -> float:
    """Returns the largest share of itself that a field keeps on a step of gradients of 0."""
    leaves, tree = jax.tree.flatten(state)
    state = tree.unflatten(
        jnp.full_like(x, _PROBE_VALUE if mine else count) if mine or _is_count(x) else x
        for x, mine in zip(leaves, is_field, strict=True)
    )
    for _ in range(_PROBE_STEPS):  # several, for transforms that accumulate gradients first
        _, state = tx.update(zero, state, params)
        pairs = zip(jax.tree.leaves(state), is_field, strict=True)
        after = [float(jnp.max(x)) for x, mine in pairs if mine]
        if max(after) != _PROBE_VALUE:
            return max(after) / _PROBE_VALUE
    return 1.0


def _is_count(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 0
