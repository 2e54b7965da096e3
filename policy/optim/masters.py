"""Master weights: the float32 values that half-precision params are a rounding of, tree by tree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.optim.rounding import round_to
from policy.optim.state import Layout, MixedPrecisionState, find_state, states_in, strong
from policy.optim.state_checks import check_tree, has_mode, require_storage
from policy.optim.storage import MasterWeights, beside, hold, kind_of, release, widen_leaf
from policy.trees import boxed_like, is_overwritten, leaf_names, path_name, shortened, unboxed, working_dtype


def without_overwritten(tree: Any) -> Any:
    """`tree` with an empty node for each leaf under `_overwrite_with_gradient`: those are no optimizer's to step."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwritten(path) else leaf, tree
    )


def layout_of(params: Any, master_weights: MasterWeights, optimizer: str) -> Layout:
    """The layout of params without their overwritten leaves, for the inner transform of that name.

    Raises:
      ValueError: a float16 param, and the mode is "remainder": its bits are no part of a float32's.
    """
    _check_mode(leaf_names(params), [leaf.dtype for leaf in jax.tree.leaves(params)], master_weights)
    names = tuple(np.dtype(leaf.dtype).name for leaf in jax.tree.leaves(params))
    return Layout(master_weights, names or None, optimizer)


def _check_mode(names: list[str], dtypes: list[Any], master_weights: MasterWeights) -> None:
    wrong = [name for name, dtype in zip(names, dtypes, strict=True) if dtype == jnp.float16]
    if wrong and master_weights == "remainder":
        raise ValueError(
            f"master_weights='remainder' is for bfloat16 params, but {shortened(wrong)} should be float16: "
            "use 'auto', which keeps full masters for float16, or 'full' or 'kahan'."
        )


def make_masters(params: Any, master_weights: MasterWeights) -> Any:
    """A tree like `params`: what is kept beside each leaf, or an empty node."""
    return jax.tree.map(lambda p: beside(p, kind_of(p.dtype, master_weights)), params)


def widen(params: Any, masters: Any, master_weights: MasterWeights) -> Any:
    """Returns the params that the inner transform sees: float32, or wider."""
    return jax.tree.map(lambda p, kept: widen_leaf(p, kept, kind_of(p.dtype, master_weights)), params, masters)


def master_params(params: Any, state: Any) -> Any:
    """The float32 weights: masters where there are any, else the params, in float32 where they are narrower.

    What evaluation, export and averages should read. Leaves under `_overwrite_with_gradient` come as they are.

    Args:
      params: the params that `state` belongs to; for an `nnx.Optimizer`, `nnx.state(model, nnx.Param)`.
      state: an optimizer state that holds a `MixedPrecisionState`, or what has one as its attribute `opt_state`.

    Raises:
      ValueError: `state` holds none, params differ from those it was made from, or masters were restored from another
        storage mode. In a traced function such masters are NaN.
    """
    if states_in(params):
        raise ValueError(
            f"params should be a tree of arrays, but got a {type(params).__name__}, which holds an optimizer state: "
            "call master_params(params, opt_state)."
        )
    state, plain = find_state(state), unboxed(params)
    state = state._replace(masters=unboxed(state.masters))
    mode = state.layout.master_weights
    is_stored = require_storage(without_overwritten(plain), state, mode)

    def one(path: Any, p: jax.Array, kept: Any) -> jax.Array:
        if is_overwritten(path):
            return p
        wide = widen_leaf(p, kept, kind_of(p.dtype, mode))
        return wide if is_stored is True else jnp.where(is_stored, wide, jnp.full_like(wide, jnp.nan))

    # an overwritten leaf pairs with an empty node too
    return boxed_like(jax.tree_util.tree_map_with_path(one, plain, state.masters), params)


def resync(params: Any, state: MixedPrecisionState) -> MixedPrecisionState:
    """A state whose masters follow `params` after these were written to, or cast, outside of the optimizer.

    A full master whose rounding is the param already keeps its low bits; any other becomes the param's value. A
    remainder, and Kahan's, can't tell which elements were written to: all of them start from the params. Moments,
    counts and the loss scale stay. The tree must be the one that the state was made from; dtypes may have changed.

    Args:
      params: the params as they are now.
      state: a `MixedPrecisionState`.

    Raises:
      TypeError: `state` is not a `MixedPrecisionState`.
      ValueError: the tree of params differs, the mode keeps no params of their dtype, or masters were restored from
        another storage mode. In a traced function all of those start from the params.
    """
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(
            f"resync takes a MixedPrecisionState, but got {type(state).__name__}: call resync(params, opt_state)."
        )
    params, boxes = without_overwritten(unboxed(params)), (state.masters, state.mode)
    state = state._replace(masters=unboxed(boxes[0]))
    mode = state.layout.master_weights
    is_stored = has_mode(state, state.layout.storage)
    check_tree(params, state)
    layout = layout_of(params, mode, state.layout.optimizer)

    def follow(p: jax.Array, kept: Any) -> Any:
        kind = kind_of(p.dtype, mode)
        if kind == "none" or getattr(kept, "dtype", None) != jnp.float32:
            return beside(p, kind)
        wide = jnp.where(is_stored & (round_to(kept, p.dtype) == p), kept, p.astype(jnp.float32))
        return release(hold(wide, p.dtype, kind), p.dtype, kind)[1]

    made = jax.tree.map(follow, params, state.masters), jnp.full_like(unboxed(state.mode), layout.storage)
    masters, code = boxed_like(made, boxes)
    return state._replace(masters=masters, mode=code, layout=layout)


def init_masters(f32_params: Any, param_dtype: Any, master_weights: MasterWeights) -> tuple[Any, Any]:
    """Params in `param_dtype`, and the masters that keep what rounding dropped; overwritten leaves as they are.

    All are rounded to nearest. Raises what `layout_of` does.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(f32_params)
    params, masters = [], []
    for path, leaf in leaves:
        if is_overwritten(path):
            params.append(leaf)
            masters.append(optax.MaskedNode())
            continue
        dtype = param_dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        _check_mode([path_name(path)], [dtype], master_weights)
        wide = jnp.asarray(leaf).astype(working_dtype(dtype))
        kind = kind_of(dtype, master_weights)
        param, kept = release(hold(wide, dtype, "none" if kind == "stochastic" else kind), dtype, kind)
        params.append(param)
        masters.append(strong(kept) if kind == "full" else kept)
    return jax.tree.unflatten(tree, params), jax.tree.unflatten(tree, masters)
