"""Master weights: the float32 values that a half-precision param is a rounding of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from policy.optim.state import Layout, MasterWeights, MixedPrecisionState, find_state, strong
from policy.trees import is_overwritten, leaf_names, shortened, working_dtype


def without_overwritten(tree: Any) -> Any:
    """`tree` with an empty node for each leaf under `_overwrite_with_gradient`: those are no optimizer's to step."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwritten(path) else leaf, tree
    )


def layout_of(params: Any, master_weights: MasterWeights) -> Layout:
    """The layout of params without their overwritten leaves."""
    names = tuple(np.dtype(leaf.dtype).name for leaf in jax.tree.leaves(params))
    return Layout(master_weights, names or None)


def has_master(dtype: Any, master_weights: MasterWeights) -> bool:
    """Whether a param of `dtype` has a master. One that is float32 or wider is its own, in every mode."""
    return master_weights != "none" and np.dtype(dtype).itemsize < 4


def make_masters(params: Any, master_weights: MasterWeights) -> Any:
    """A tree like `params`: the float32 master of each leaf that has one, else an empty node."""
    return jax.tree.map(
        lambda p: p.astype(jnp.float32) if has_master(p.dtype, master_weights) else optax.MaskedNode(), params
    )


def widen(params: Any, masters: Any) -> Any:
    """What the inner transform sees as params: the master, or the param itself in float32 or what is wider."""
    return jax.tree.map(
        lambda p, m: p.astype(working_dtype(p.dtype)) if isinstance(m, optax.MaskedNode) else m, params, masters
    )


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in a param's dtype. float32 to bfloat16 rounds to nearest, half away from zero; the rest half to even.

    Half away from zero is `bits + 0x8000`, cut: unlike half to even, it can be taken apart again from the low 16 bits.
    It overflows to infinity exactly where rounding to nearest does (from 2^128 - 2^119 on). NaN stays NaN.
    """
    if dtype != jnp.bfloat16 or x.dtype != jnp.float32:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    high = ((bits + jnp.uint32(0x8000)) >> jnp.uint32(16)).astype(jnp.uint16)
    quiet = (bits >> jnp.uint32(16)).astype(jnp.uint16) | jnp.uint16(0x40)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(x), quiet, high), jnp.bfloat16)


def master_params(params: Any, state: Any) -> Any:
    """The float32 weights: masters where there are any, else the params, in float32 where they are narrower.

    What evaluation, export and averages should read. Leaves under `_overwrite_with_gradient` come as they are.

    Args:
      params: the params that `state` belongs to.
      state: an optimizer state that holds a `MixedPrecisionState`.

    Raises:
      ValueError: `state` holds none, or params differ from those it was made from.
    """
    state = find_state(state)
    check_layout(without_overwritten(params), state)
    # an overwritten leaf pairs with an empty node too
    return jax.tree_util.tree_map_with_path(
        lambda path, p, m: p if is_overwritten(path) else widen(p, m), params, state.masters
    )


def resync(params: Any, state: MixedPrecisionState) -> MixedPrecisionState:
    """A state whose masters follow `params` after these were written to, or cast, outside of the optimizer.

    A master whose rounding is the param already keeps its low bits; any other becomes the param's value. Moments,
    counts and the loss scale stay. The tree must be the one that the state was made from; dtypes may have changed.

    Args:
      params: the params as they are now.
      state: a `MixedPrecisionState`.

    Raises:
      TypeError: `state` is not a `MixedPrecisionState`.
      ValueError: the tree of params differs.
    """
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(f"resync takes a MixedPrecisionState, but got {type(state).__name__}.")
    params = without_overwritten(params)
    check_tree(params, state)
    mode = state.layout.master_weights

    def follow(p: jax.Array, m: Any) -> Any:
        if not has_master(p.dtype, mode):
            return optax.MaskedNode()
        wide = p.astype(jnp.float32)
        if isinstance(m, optax.MaskedNode):
            return wide
        return jnp.where(round_to(m, p.dtype) == p, m, wide)

    masters = jax.tree.map(follow, params, state.masters)
    return state._replace(masters=masters, layout=layout_of(params, mode))


def init_masters(f32_params: Any, param_dtype: Any, master_weights: MasterWeights) -> tuple[Any, Any]:
    """Params in `param_dtype`, and the masters that keep what rounding dropped; overwritten leaves as they are."""

    def rounded(path: Any, p: jax.Array) -> jax.Array:
        if is_overwritten(path) or not jnp.issubdtype(p.dtype, jnp.floating):
            return p
        return round_to(p, param_dtype)

    params = jax.tree_util.tree_map_with_path(rounded, f32_params)
    masters = jax.tree.map(
        lambda p, w: strong(w) if has_master(p.dtype, master_weights) else optax.MaskedNode(),
        without_overwritten(params),
        without_overwritten(f32_params),
    )
    return params, masters


def check_tree(params: Any, state: MixedPrecisionState) -> None:
    """Refuses params, less their overwritten leaves, that are not the tree the state was made from."""
    is_empty = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    if jax.tree.structure(params, is_leaf=is_empty) != jax.tree.structure(state.masters, is_leaf=is_empty):
        names = leaf_names(params)
        raise ValueError(
            "params should be the tree that the optimizer state was made from, but got another, "
            f"with {len(names)} leaves: {shortened(names)}. Make a state for it with tx.init(params)."
        )


def check_layout(params: Any, state: MixedPrecisionState) -> None:
    """Refuses params, less their overwritten leaves, whose tree or dtypes are not those the state was made from."""
    check_tree(params, state)
    if state.layout.dtypes is None:
        return
    wrong = [
        f"{name} was {before} and is {leaf.dtype}"
        for name, leaf, before in zip(leaf_names(params), jax.tree.leaves(params), state.layout.dtypes, strict=True)
        if np.dtype(leaf.dtype).name != before
    ]
    if wrong:
        raise ValueError(
            f"The dtype of params changed since the optimizer state was made: {shortened(wrong)}. "
            "Cast them back, or call resync(params, state) first."
        )
