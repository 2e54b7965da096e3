"""Arrays and trees of them: casts, names of leaves, boxes and mapped axes.

Only floating arrays are cast, and only if they have another dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------


def require_available(dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` as a NumPy dtype, or raises if JAX would silently narrow it.

    Raises:
      ValueError: `dtype` is float64 while x64 is disabled.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"A policy asks for {dtype.name}, but JAX runs with x64 disabled and would silently "
            "use float32. "
            "Call jax.config.update('jax_enable_x64', True) first, or choose float32."
        )
    return dtype


def is_floating(x: Any) -> bool:
    """Returns whether `x` is a floating array.

    Arrays are JAX arrays and tracers, NumPy arrays and scalars, and `ShapeDtypeStruct`s.
    """
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return isinstance(x, arrays) and jnp.issubdtype(x.dtype, jnp.floating)


def cast_array(x: Any, dtype: DTypeLike, *, complex_too: bool = False) -> Any:
    """Casts `x` to `dtype` if it is a floating array; returns other values unchanged.

    With `complex_too`, complex arrays are cast to the complex dtype whose parts have the width of
    `dtype`, but at least to complex64, the narrowest that JAX has.
    """
    if not is_floating(x):
        has_dtype = complex_too and hasattr(x, "dtype")
        if not (has_dtype and jnp.issubdtype(x.dtype, jnp.complexfloating)):
            return x
        dtype = jnp.complex128 if jnp.dtype(dtype).itemsize == 8 else jnp.complex64
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype), weak_type=False)
    return x.astype(dtype)


def cast_floating(
    tree: T,
    dtype: DTypeLike,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    complex_too: bool = False,
) -> T:
    """Casts the floating arrays of a tree to `dtype`.

    Integers, booleans, PRNG keys, complex numbers (unless `complex_too`), non-arrays and arrays
    that already have the dtype are returned unchanged.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> tree = policy.cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.bfloat16)
    >>> tree["w"].dtype, tree["step"].dtype
    (dtype(bfloat16), dtype('int32'))

    Args:
      tree: a tree; arrays may be `jax.ShapeDtypeStruct`.
      dtype: a floating dtype.
      is_leaf: stops the walk as in `jax.tree.map`. The nodes it stops at are returned by identity
        unless they are floating arrays themselves.
      complex_too: whether complex arrays are cast, to the complex dtype with parts of that width;
        complex64 is the narrowest.

    Returns:
      A tree of the same structure and shapes.

    Raises:
      ValueError: `dtype` is float64 while x64 is disabled.
    """
    cast = functools.partial(cast_array, dtype=require_available(dtype), complex_too=complex_too)

    def stops(node: Any) -> bool:
        return is_quantized(node) or (is_leaf is not None and is_leaf(node))

    return jax.tree.map(cast, tree, is_leaf=stops)


def is_quantized(x: Any) -> bool:
    """Returns whether `x` is a `QuantizedArray`: frozen quantized values, which no cast changes."""
    return getattr(type(x), "is_quantized", False) is True


# --------------------------------------------------------------------------------------------------
# Trees, as gradients and optimizers walk them
# --------------------------------------------------------------------------------------------------


OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax's collection of fp8 scales. Its "gradient" from `jax.grad` is its new value."""


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a tree path for messages: `encoder/layer_0/kernel`; `(root)` for a single leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def leaf_names(tree: Any) -> list[str]:
    """Returns the path of every leaf, in flattening order."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def nnx_files(value: Any) -> frozenset[str]:
    """Returns the modules of flax.nnx that define the bases of an object's class, as in
    "flax.nnx.module"; none for objects of others. `policy` imports no Flax.
    """
    names = {cls.__module__ or "" for cls in type(value).__mro__}
    return frozenset(name for name in names if f"{name}.".startswith("flax.nnx."))


def is_overwritten(path: tuple[Any, ...]) -> bool:
    """Returns whether a path contains a mapping key named `_overwrite_with_gradient`."""
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return OVERWRITE_WITH_GRADIENT in keys


def map_gradients(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `function` over the leaves of `tree`, except under `_overwrite_with_gradient`."""

    def mapped(path: tuple[Any, ...], leaf: Any, *others: Any) -> Any:
        return leaf if is_overwritten(path) else function(leaf, *others)

    return jax.tree_util.tree_map_with_path(mapped, tree, *rest)


def unboxed(tree: Any) -> Any:
    """Returns `tree` with each box replaced by its content.

    A box is a pytree node with one child that converts to an array: an nnx Variable. `nnx.state`
    has one around each parameter, and `nnx.Optimizer` one around each leaf of its state.
    """
    return jax.tree.map(
        lambda node: _children(node)[0][0] if _is_box(node) else node, tree, is_leaf=_is_box
    )


def boxed_like(tree: Any, boxes: Any) -> Any:
    """Puts the leaves of `tree`, which is like an unboxed `boxes`, into boxes of the same kinds."""
    kinds, structure = jax.tree.flatten(boxes, is_leaf=_is_box)
    if not any(map(_is_box, kinds)):
        return tree
    contents = structure.flatten_up_to(tree)
    return structure.unflatten(
        _children(kind)[1].unflatten([content]) if _is_box(kind) else content
        for kind, content in zip(kinds, contents, strict=True)
    )


def boxed_parts(tree: Any, kind: type) -> Any:
    """Returns `tree` with each box of a node of some kind inside of the node, around its leaves.

    nnx sees through such a node to its leaves, and gives them back to the boxes.
    """

    def one(node: Any) -> Any:
        if not _is_box(node):
            return node
        (content,), structure = _children(node)
        if not isinstance(content, kind):
            return node
        return jax.tree.map(lambda leaf: structure.unflatten([leaf]), content)

    return jax.tree.map(one, tree, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    return hasattr(node, "__jax_array__") and len(_children(node)[0]) == 1


def _children(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def is_inexact(x: Any) -> bool:
    """Returns whether a leaf is floating or complex: can be differentiated and scaled."""
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact)


def working_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype that a leaf is updated in: float32, or its own if float64 or complex."""
    wide = (jnp.float64, jnp.complex64, jnp.complex128)
    return jnp.dtype(dtype) if dtype in wide else jnp.dtype(jnp.float32)


# --------------------------------------------------------------------------------------------------
# Mapped axes of `jax.shard_map` and `jax.vmap`, and arrays whose types vary over them
# --------------------------------------------------------------------------------------------------


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mapped axes over which, by the type of `x`, devices hold different values.

    Types say so inside `jax.shard_map`, unless it was told `check_vma=False`; under `jax.vmap` they
    don't.
    """
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def is_typed(axis: Hashable) -> bool:
    """Returns whether the types of arrays say which vary over a mapped axis.

    Raises:
      ValueError: the axis is not mapped here.
    """
    try:
        index = lax.axis_index(axis)
    except NameError:
        raise ValueError(
            f"axis {axis!r} is not mapped here: call the function inside jax.shard_map or jax.vmap "
            "over that axis. Under jax.jit with sharded arrays, pass no axis: XLA reduces over the "
            "devices by itself."
        ) from None
    return axis in varying_axes(index)


def axes_of_leaves(tree: Any, axis_name: Sequence[Hashable]) -> list[frozenset[Hashable]]:
    """Returns, for each leaf, the mapped axes over which devices hold different parts of it.

    Inside `jax.shard_map` the type of each leaf says so. Axes that types say nothing about
    (`check_vma=False`, `jax.vmap`) are those of `axis_name`, for every leaf.
    """
    untyped = frozenset(axis for axis in axis_name if not is_typed(axis))
    return [varying_axes(leaf) | untyped for leaf in jax.tree.leaves(tree)]


def alike_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays with types that vary over the mapped axes of all of them.

    Operations of JAX do so by themselves; the cotangents of a rule of one's own have to vary as its
    arguments do.
    """
    axes = frozenset[Any]().union(*map(varying_axes, arrays))
    return [make_varying(x, axes) for x in arrays]


def make_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `x` with a type that varies over `axes` too, where types tell."""
    missing = tuple(sorted((a for a in axes - varying_axes(x) if is_typed(a)), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x
