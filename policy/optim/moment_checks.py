"""Refusals of moments that can't be stored narrow, found by steps of params of one element."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.core.messages import shortened
from policy.optim.blockwise import FORMATS
from policy.optim.moments import FIRST_MOMENTS, asked_dtypes, field_of

LARGEST_RETENTION = 0.98
"""The largest decay rate at which a bfloat16 mean that is rounded to nearest converges.

At .99 it stops at 0.8 of the true value, at .999 at once.
"""

_PROBE_PARAM, _PROBE_VALUE, _PROBE_STEPS = 1.2345, 0.75, 64
_PROBE_SIGNS = (1.0, -2.0, 3.0, -0.5)


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
        sum; a field that is no first moment is to be in 8 bits and has a sign; or a mean of squares
        in bfloat16, or any mean in 8 bits, decays to more of itself than rounding to nearest
        follows, and is not rounded stochastically.
    """
    if not jax.tree.leaves(params):
        return
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    fields = [field_of(path, suffixes) for path, _ in jax.tree_util.tree_leaves_with_path(inner)]
    targets = asked_dtypes(inner, params, dtypes)
    found = {name for name, target in zip(fields, targets, strict=True) if target}
    seen = shortened(sorted({name for name in fields if name})) or "none"
    for name in dtypes:
        if not found if name == "" else name not in found:
            asked = "first moment" if name == "" else f"field {name!r}"
            raise ValueError(
                f"moment_dtype matched nothing: the state of tx has no {asked}. Its fields: {seen}."
            )
    default = dtypes.get("", np.dtype("float32"))
    for name in sorted(found):
        dtype = dtypes.get(name, default)
        if dtype.itemsize < 4:
            _check_field(tx, params, name, dtype, stochastic)


def _check_field(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    name: str,
    dtype: np.dtype,
    stochastic: bool,
) -> None:
    form, is_first = FORMATS.get(dtype), name in FIRST_MOMENTS
    try:
        with jax.ensure_compile_time_eval():
            is_copy, is_negative, kept = _tried(tx, params, name)
    except Exception as error:
        # a transform that needs more arguments: a first moment is one by its name
        if is_first and (form is None or stochastic):
            return
        raise ValueError(
            f"moment_dtype for {name!r} can't be checked: a trial step on params of one element "
            f"failed ({error}). Leave it float32."
        ) from error
    shown = "bfloat16" if form is None else "8 bits"
    if is_copy or kept >= 1 - 2.0**-22:
        what = "copy of the params" if is_copy else "running sum"
        raise ValueError(
            f"moment_dtype for {name!r} is refused: the field is a {what}. Leave it float32."
        )
    if is_negative and form is not None and not is_first:
        raise ValueError(
            f"moment_dtype for {name!r} is 8 bits, which store a sign for first moments only, but "
            "a step makes this field negative: make it bfloat16, or leave it float32."
        )
    largest = 1.0 if is_first else LARGEST_RETENTION
    largest = largest if form is None else form.largest_retention
    if kept > largest and not stochastic:
        raise ValueError(
            f"moment_dtype for {name!r} is {shown}, but its decay rate is {kept:.6g}. Above "
            f"{largest:.2g}, rounding to nearest undoes the decay: leave it float32, or pass "
            "key=jax.random.key(0) for stochastic rounding."
        )


def _tried(
    tx: optax.GradientTransformationExtraArgs, params: optax.Params, name: str
) -> tuple[bool, bool, float]:
    """Steps params of one element, and looks at a field of the state.

    Returns:
      Whether the field starts as the params; whether gradients of both signs make it negative; and
      the largest share of itself that it keeps on a step of gradients of 0.
    """
    small = jax.tree.map(lambda p: jnp.full((1,) * p.ndim, _PROBE_PARAM, jnp.float32), params)
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(small)}
    start = tx.init(small)
    leaves, tree = jax.tree_util.tree_flatten_with_path(start)
    is_mine = [field_of(path, suffixes) == name for path, _ in leaves]

    def field(state: optax.OptState) -> list[jax.Array]:
        return [x for x, mine in zip(jax.tree.leaves(state), is_mine, strict=True) if mine]

    def stepped(state: optax.OptState, gradient: float) -> optax.OptState:
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), small)
        return tx.update(gradients, state, small)[1]

    def kept(count: int) -> float:
        state = tree.unflatten(
            jnp.full_like(x, _PROBE_VALUE if mine else count) if mine or _is_count(x) else x
            for (_, x), mine in zip(leaves, is_mine, strict=True)
        )
        for _ in range(_PROBE_STEPS):  # several, for transforms that accumulate gradients first
            state = stepped(state, 0)
            largest = max(float(jnp.max(x)) for x in field(state))
            if largest != _PROBE_VALUE:
                return largest / _PROBE_VALUE
        return 1.0

    is_copy = all(bool(jnp.all(x == np.float32(_PROBE_PARAM))) for x in field(start))
    states = itertools.accumulate(_PROBE_SIGNS, stepped, initial=start)
    is_negative = any(bool(jnp.any(x < 0)) for state in states for x in field(state))
    return is_copy, is_negative, max(kept(count) for count in (1, 10**5))


def _is_count(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 0
