"""Moments of optax states in 16 or 8 bits: their fields and dtypes, and a transform around another
that stores them so; errors for moments that can't be, found by steps of params of one element.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from policy.core.arrays import boxed_parts, varying_axes, working_dtype
from policy.core.dtypes import dtype_names, parse_dtype
from policy.core.messages import shortened
from policy.core.quantization import Quantized
from policy.optim.blockwise import FORMATS, LARGEST_DECAY, Format, decode, encode
from policy.optim.storage_modes import round_stochastically, round_to, rounding_keys

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
        Names of dtypes are those that a Policy takes, "bf16", "f32", "half", and "int8".

    Returns:
      Field names to dtypes, where "" stands for every first moment; or None. In 8 bits they are
      those of the codes, see `blockwise`: int8 for first moments, uint8 for other fields.

    Raises:
      ValueError: a dtype is none of these, or float16 for a field that is no first moment.
    """
    if moment_dtype is None:
        return None
    asked = dict(moment_dtype) if isinstance(moment_dtype, Mapping) else {"": moment_dtype}
    return {name: _storage_dtype(name, dtype) for name, dtype in asked.items()}


def _storage_dtype(name: str, asked: DTypeLike | None) -> np.dtype:
    kind = asked if asked is None or isinstance(asked, str) else jnp.dtype(asked).name
    if kind in ("int8", "uint8"):
        return np.dtype("int8" if is_first(name) else "uint8")
    if kind is None or kind not in dtype_names() or parse_dtype(kind).itemsize > 4:
        raise ValueError(
            f"moment_dtype should be bfloat16, float16, float32 or 'int8', but got {asked!r}."
        )
    if parse_dtype(kind) == jnp.float16 and not is_first(name):
        raise ValueError(
            f"moment_dtype for {name!r} is float16, in which the square of 256 overflows and the "
            "square of 1e-4 is 0: use bfloat16 or float32."
        )
    return parse_dtype(kind)


def is_first(name: str) -> bool:
    """Returns whether a field holds a first moment; "" stands for all that do."""
    return name in ("", *FIRST_MOMENTS)


StoredForm: TypeAlias = np.dtype | Format | None
"""The form that a leaf is stored in: codes, or a floating dtype; None for one that stays as is."""

_FORMS: dict[np.dtype, Format] = {form.dtype: form for form in FORMATS}


def is_stored_as_codes(node: Any) -> bool:
    """Returns whether a node of a state is a moment in 8 bits."""
    return isinstance(node, Quantized)


def moments_in(inner: optax.OptState) -> list[Any]:
    """Returns the leaves of an optax state, where a moment in 8 bits is one leaf."""
    return jax.tree.leaves(inner, is_leaf=is_stored_as_codes)


def stored_forms(
    inner: optax.OptState, params: optax.Params, dtypes: Mapping[str, np.dtype]
) -> list[StoredForm]:
    """Returns, for each leaf of an optax state, the form that it is stored in.

    None for leaves that are no moments, or too small for codes, and stay as they are. Moments that
    are stored as codes already are of any size: inside `jax.shard_map` they are parts of larger
    ones.
    """

    def is_stored(leaf: Any, form: StoredForm) -> bool:
        if not isinstance(form, Format) or is_stored_as_codes(leaf):
            return True
        return leaf.size >= SMALLEST_SIZE and leaf.shape[-1] >= SMALLEST_WIDTH

    pairs = zip(moments_in(inner), asked_forms(inner, params, dtypes), strict=True)
    return [form if is_stored(leaf, form) else None for leaf, form in pairs]


def asked_forms(
    inner: optax.OptState, params: optax.Params, dtypes: Mapping[str, np.dtype]
) -> list[StoredForm]:
    """Returns, for each leaf of an optax state, the form that is asked for its field, or None."""
    forms: list[StoredForm] = []
    for name, leaf in zip(fields_of(inner, params), moments_in(inner), strict=True):
        dtype = dtypes.get(name, dtypes.get("") if name in FIRST_MOMENTS else None)
        forms.append(None if dtype is None or not is_moment(leaf) else _FORMS.get(dtype, dtype))
    return forms


def is_moment(leaf: Any) -> bool:
    """Returns whether a leaf of a state is a real floating array, or codes of one."""
    is_array = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_array or is_stored_as_codes(leaf)


def fields_of(inner: optax.OptState, params: optax.Params) -> list[str]:
    """Returns, for each leaf of an optax state, the innermost field that it lies in.

    Fields of the params themselves don't count.
    """
    suffixes = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    fields = []
    for path, _ in jax.tree_util.tree_leaves_with_path(inner, is_leaf=is_stored_as_codes):
        cut = next((i for i in range(len(path) + 1) if path[i:] in suffixes), len(path))
        names = [key.name for key in path[:cut] if isinstance(key, jax.tree_util.GetAttrKey)]
        fields.append(names[-1] if names else "")
    return fields


def store_moments(
    inner: optax.GradientTransformationExtraArgs,
    dtypes: Mapping[str, np.dtype],
    key: jax.Array | None,
    axis_name: Sequence[Hashable],
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transform so that its moments are stored in fewer bits, and computed in float32.

    Args:
      inner: the transform.
      dtypes: see `get_moment_dtypes`.
      key: the PRNG key of stochastic rounding, or None.
      axis_name: see `axes_of_leaves`.

    Returns:
      A transform whose `update` takes the step's number as `rounding_count`, () int32.
    """

    def init(params: Any) -> optax.OptState:
        state = inner.init(params)
        return boxed_parts(downcast_moments(state, stored_forms(state, params, dtypes)), Quantized)

    def update(
        updates: Any,
        state: optax.OptState,
        params: Any = None,
        *,
        rounding_count: Any,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        forms = stored_forms(state, params, dtypes)
        updates, new = inner.update(updates, upcast_moments(state, forms), params, **extra)
        leaves, first = jax.tree.leaves(new), len(jax.tree.leaves(params))
        keys = rounding_keys(key, leaves, rounding_count, axis_name, first=first)
        return updates, downcast_moments(new, forms, keys, moments_in(state))

    return optax.GradientTransformationExtraArgs(init, cast("Any", update))


def upcast_moments(inner: optax.OptState, forms: Sequence[StoredForm]) -> optax.OptState:
    """Returns a state whose moments of a form are float32, in which the transform computes."""
    leaves, tree = jax.tree.flatten(inner, is_leaf=is_stored_as_codes)
    pairs = zip(leaves, forms, strict=True)
    return tree.unflatten([x if form is None else _upcast(x) for x, form in pairs])


def _upcast(x: Any) -> jax.Array:
    return decode(x) if is_stored_as_codes(x) else x.astype(working_dtype(x.dtype))


def moment_like(x: Any, like: Any) -> Any:
    """Returns a leaf of a state in the form of another one; leaves that are no moments as they are.

    Args:
      x: the leaf, see `moments_in`.
      like: a leaf of the same shape, or its shapes.
    """
    form = like.codec if is_stored_as_codes(like) else like.dtype
    own = x.codec if is_stored_as_codes(x) else getattr(x, "dtype", None)
    return x if own == form or not is_moment(x) else _downcast(_upcast(x), form, None, None)


def downcast_moments(
    inner: optax.OptState,
    forms: Sequence[StoredForm],
    keys: Sequence[jax.Array | None] | None = None,
    before: Sequence[Any] | None = None,
) -> optax.OptState:
    """Rounds the moments of a state to the forms that they are stored in.

    A finite moment beyond float16 becomes its largest number: an infinite one would stay for good.

    Args:
      inner: a state of an optax transform.
      forms: see `stored_forms`.
      keys: PRNG keys of stochastic rounding, one for each leaf; None rounds to nearest.
      before: the leaves of the state before, see `moments_in`. Where devices that hold different
        parts of a moment share a scale, they compute it together again.
    """
    leaves, tree = jax.tree.flatten(inner, is_leaf=is_stored_as_codes)
    none = [None] * len(leaves)
    each = zip(leaves, forms, keys or none, before or none, strict=True)
    return tree.unflatten([x if f is None else _downcast(x, f, key, b) for x, f, key, b in each])


def _downcast(x: jax.Array, form: np.dtype | Format, key: jax.Array | None, before: Any) -> Any:
    if isinstance(form, Format):
        is_new = not is_stored_as_codes(before)
        shared = frozenset() if is_new else varying_axes(x) - varying_axes(before.scale)
        return encode(x.astype(jnp.float32), form, key, tuple(sorted(shared, key=str)))
    if form.itemsize >= 4:
        return x.astype(form)
    largest = np.float32(jnp.finfo(form).max)
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return round_to(x, form) if key is None else round_stochastically(x, form, key)


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
    """Rejects moments that can't be stored as asked.

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
        sum; a field that is no first moment is to be codes and has a sign; or a mean of squares
        in bfloat16, or any mean stored as codes, decays to more of itself than rounding to nearest
        follows, and is not rounded stochastically.
    """
    if not jax.tree.leaves(params):
        return
    fields = fields_of(inner, params)
    pairs = zip(fields, asked_forms(inner, params, dtypes), strict=True)
    found = {name for name, target in pairs if target is not None}
    seen = shortened(sorted({name for name in fields if name})) or "none"
    for name in dtypes:
        if not found if name == "" else name not in found:
            asked = "first moment" if name == "" else f"field {name!r}"
            raise ValueError(
                f"moment_dtype matched nothing: the state of tx has no {asked}. Its fields: {seen}."
            )
    for name in sorted(found):
        dtype = dtypes[name if name in dtypes else ""]
        if dtype.itemsize < 4:
            _check_field(tx, params, name, _FORMS.get(dtype, dtype), stochastic)


def _check_field(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    name: str,
    target: np.dtype | Format,
    stochastic: bool,
) -> None:
    form = target if isinstance(target, Format) else None
    try:
        with jax.ensure_compile_time_eval():
            is_copy, is_negative, kept = _tried(tx, params, name)
    except Exception as error:
        # a transform that needs more arguments: a first moment is one by its name
        if is_first(name) and (form is None or stochastic):
            return
        raise ValueError(
            f"moment_dtype for {name!r} can't be checked: a trial step on params of one element "
            f"failed ({error}). Leave it float32."
        ) from error
    shown = "bfloat16" if form is None else "8 bits"
    if is_copy or kept >= 1 - 2.0**-22:
        what = "copy of the params" if is_copy else "running sum"
        raise ValueError(
            f"moment_dtype for {name!r} is rejected: the field is a {what}. Leave it float32."
        )
    if is_negative and form is not None and not is_first(name):
        raise ValueError(
            f"moment_dtype for {name!r} is {shown}, which store a sign for first moments only, but "
            "a step makes this field negative: make it bfloat16, or leave it float32."
        )
    largest = 1.0 if is_first(name) else LARGEST_RETENTION
    largest = largest if form is None else LARGEST_DECAY
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
    start = tx.init(small)
    leaves, tree = jax.tree.flatten(start)
    is_mine = [field == name for field in fields_of(start, small)]

    def field(state: optax.OptState) -> list[jax.Array]:
        return [x for x, mine in zip(jax.tree.leaves(state), is_mine, strict=True) if mine]

    def stepped(state: optax.OptState, gradient: float) -> optax.OptState:
        gradients = jax.tree.map(lambda p: jnp.full_like(p, gradient), small)
        return tx.update(gradients, state, small)[1]

    def kept(count: int) -> float:
        state = tree.unflatten(
            jnp.full_like(x, _PROBE_VALUE if mine else count) if mine or _is_count(x) else x
            for x, mine in zip(leaves, is_mine, strict=True)
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
