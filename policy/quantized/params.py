"""Trees of parameters stored in 8 and 4 bits: conversion, and division into frozen and trainable
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from policy.core.arrays import is_floating, is_quantized, nnx_files, path_name
from policy.core.param_formats import ParamFormat
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules, RulesLike, as_rules
from policy.programs.paths import joined
from policy.quantized.array import QuantizedArray

NOT_QUANTIZED = ("bias", "scale", "mean", "var", "alpha")
"""Names of parameters that stay as they are: no matmul contracts them."""

ADAPTERS = ("lora_a", "lora_b")
"""Names of adapters, or of the layers that they are the kernels of, which stay as they are."""

_OF_ATTENTION = {"query", "key", "value"}

_SHORTEST = 16  # fewer numbers than that would not pay for a scale


def axis_of(
    names: Sequence[str], shape: tuple[int, ...], format: ParamFormat, last: int = -2
) -> int | None:
    """Returns the axis of a parameter along which codes are to share scales, or None of one that
    stays as it is, such as one that is shorter there than a block.

    It is the last but one, which a matmul contracts, or the next one before it that is long enough;
    of the kernels (in, heads, features) of an attention's queries, keys and values the third from
    last; of a table of embeddings without blocks, or with no whole number of them, the last, so
    that each row has its scales.

    Args:
      names: of the modules that lead to it, and its own.
      shape: of the parameter.
      format: that it is to have.
      last: the last axis that its matmul contracts.
    """
    if len(shape) < 2 or names[-1] in NOT_QUANTIZED or set(ADAPTERS) & {*names[-2:]}:
        return None
    of_attention = len(shape) > 2 and bool(_OF_ATTENTION & {*names[-3:-1]})  # query/base_module
    axes: tuple[int, ...] = (-3,) if of_attention else tuple(range(last, -len(shape) - 1, -1))
    if names[-1] == "embedding" and (format.block is None or shape[-2] % format.block):
        axes = (-1,)
    shortest = format.block or _SHORTEST
    return next((axis for axis in axes if shape[axis] >= shortest), None)


def quantize_params(
    variables: Any,
    policy: Policy | str,
    rules: RulesLike | None = None,
    *,
    axis: Callable[[str, tuple[int, ...]], int | None] | None = None,
) -> Any:
    """Stores parameters in the 8 or 4 bits of a policy, such as ``params=int4:32``.

    Floating parameters of at least two axes are quantized, but for biases, scales of
    normalizations, adapters (`lora_a`, `lora_b`) and parameters shorter than a block. Blocks lie
    along the axis that a matmul contracts: see `policy.quantized.params.axis_of`. Boxes that name
    axes, as of `flax.linen.Partitioned`, hold the codes and the scales afterwards.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> params = {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}}
    >>> stored = policy.quantized.quantize_params(params, "params=int8,compute=bfloat16")
    >>> stored["dense"]["kernel"]
    QuantizedArray('int8', (64, 8), float32)
    >>> stored["dense"]["bias"].dtype
    dtype('float32')

    Args:
      variables: the variables of a linen model, with or without their collections, or any tree of
        parameters. Arrays may be `jax.ShapeDtypeStruct`.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them, by the paths of modules. Parameters under a
        policy of 16 bits or more stay as they are.
      axis: returns the axis along which the codes of a parameter share scales, or None of one that
        stays as it is, given its path and its shape.

    Returns:
      The tree with a `QuantizedArray` for each parameter that is quantized. Quantized ones stay as
      they are.

    Raises:
      ValueError: a parameter has no whole number of blocks, or numbers that are not finite; a rule
        matches nothing; or neither policy nor rules have an 8- or 4-bit format.
      TypeError: an nnx model is given.
    """
    if nnx_files(variables):
        raise TypeError(
            "quantize_params takes a tree of parameters: mpmodules.nnx.apply_policy(model, policy) "
            "returns an nnx model with quantized parameters."
        )
    if axis is not None and not callable(axis):
        raise TypeError(
            "axis should be a function of a parameter's path and shape, but got "
            f"{axis!r}: write axis=lambda path, shape: {axis!r}."
        )
    held, found = get_policy(policy), as_rules(rules) or PolicyRules()
    if all(each.param_format is None for each in (held, *(one for _, one in found))):
        raise ValueError(
            f"'{held}' stores parameters in {held.param_dtype}: quantize_params needs a policy or "
            "a rule with params=int8, float8, int4 or nf4."
        )
    of_params = "params" in variables if isinstance(variables, Mapping) else False
    tree = variables["params"] if of_params else variables
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_whole)
    places = [tuple(path_name(path).split("/")) for path, _ in leaves]
    found.check({joined(names[:n]) for names in places for n in range(len(names))})
    stored = [
        stored_by_policy(leaf, names, _policy_at(names, held, found), axis)
        for names, (_, leaf) in zip(places, leaves, strict=True)
    ]
    tree = treedef.unflatten(stored)
    return {**variables, "params": tree} if of_params else tree


def _policy_at(names: tuple[str, ...], held: Policy, rules: PolicyRules) -> Policy:
    """Returns the policy of a parameter: that of the innermost module that a rule matches."""
    for n in range(len(names) - 1, -1, -1):
        rule = rules.rule_at(names[:n])
        if rule is not None:
            return rule[1]
    return held


def stored_by_policy(leaf: Any, names: tuple[str, ...], policy: Policy, axis: Any = None) -> Any:
    """Returns a parameter as a policy stores it: as codes, or as it is.

    Args:
      leaf: an array or its shape, also in a box.
      names: of the modules that lead to it, and its own.
      policy: the policy that its module obeys.
      axis: as in `quantize_params`.
    """
    boxed = hasattr(leaf, "unbox") and not is_quantized(leaf)
    array = leaf.value if boxed else leaf
    if policy.param_format is None or not is_floating(array):
        return leaf
    if axis is None:
        along = axis_of(names, tuple(array.shape), policy.param_format)
    else:
        along = axis(joined(names), tuple(array.shape))
    if along is None:
        return leaf
    made = quantized_param(array, policy.param_format, along, joined(names))
    return _in_boxes(leaf, made, array.ndim) if boxed else made


def require_trainable(policy: Policy | None, names: tuple[str, ...], made: Any) -> None:
    """Raises ValueError for a parameter just made, which a policy would store in 8 or 4 bits.

    Args:
      policy: the policy that its module obeys.
      names: of the modules that lead to it, and its own.
      made: the array.
    """
    held = None if policy is None else policy.param_format
    if held is None or not is_floating(made) or axis_of(names, tuple(made.shape), held) is None:
        return
    raise ValueError(
        f"Parameter '{joined(names)}' would be created in {held.text}, where an update that is "
        "smaller than a step of its codes is lost: such parameters are frozen. Initialize under "
        "params=float32 or bfloat16, then call policy.quantized.quantize_params(variables, policy) "
        "or nnx.apply_policy(model, policy), and train adapters such as nnx.LoRA beside it; or "
        "multiply trainable parameters in 8 bits with mixed_int8."
    )


def quantized_param(array: Any, format: ParamFormat, axis: int, path: str) -> QuantizedArray:
    """Returns a parameter as codes, or raises ValueError with its path."""

    def of(array: Any) -> QuantizedArray:
        return QuantizedArray.of(array, format, axis=axis)

    try:
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.eval_shape(of, array)
        if isinstance(array, jax.core.Tracer):
            return of(array)
        with jax.ensure_compile_time_eval():  # of an array that a traced function closes over, too
            made = of(array)
            is_finite = bool(jnp.isfinite(made.scales).all())
    except ValueError as error:
        raise ValueError(f"Parameter '{path}': {error}") from None
    if not is_finite:
        raise ValueError(
            f"Parameter '{path}' holds numbers that are not finite, too large or too far apart, "
            f"which no scale of {format.text} can hold. Exclude it by a rule, such as "
            "{'" + path.rpartition("/")[0] + "': 'bfloat16'}."
        )
    return made


def _in_boxes(box: Any, made: QuantizedArray, ndim: int) -> QuantizedArray:
    """Puts codes and scales into boxes like that of the array, with names for their axes."""
    names, layout = tuple(box.names), made.layout
    axis = ndim + layout.axis
    of_codes = names
    if layout.format.block is not None:
        after = [name for name in names[axis + 1 :] if name is not None][:1]
        of_codes = (*names[: axis + 1], None, *((after or [None]) if layout.axis < -1 else ()))
    shared = len(of_codes) + layout.shared
    pair = (None,) if layout.codec.has_minimum else ()
    of_scales = (*of_codes[:axis], None, *of_codes[axis:shared], *pair, *of_codes[shared + 1 :])
    codes = box.replace(value=made.codes, names=of_codes)
    return QuantizedArray(codes, box.replace(value=made.scales, names=of_scales), layout)


def _is_whole(node: Any) -> bool:
    return is_quantized(node) or (hasattr(node, "unbox") and hasattr(node, "names"))


def dequantize_params(tree: Any) -> Any:
    """Returns a tree with an array, in the dtype that it was quantized from, for each
    `QuantizedArray`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantized.quantize_params({"kernel": jnp.ones((64, 8))}, "params=int8")
    >>> policy.quantized.dequantize_params(stored)["kernel"].dtype
    dtype('float32')

    Args:
      tree: any.
    """
    return jax.tree.map(lambda x: x.widened() if is_quantized(x) else x, tree, is_leaf=is_quantized)


def split_frozen(params: Any, trains: Callable[[str], bool] | None = None) -> tuple[Any, Any]:
    """Divides parameters into trainable and frozen ones: the quantized, and those that `trains`
    leaves out.

    Both trees have None in place of what the other has, so that `jax.grad` and optax take the first
    one as it is.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantized.quantize_params(
    ...     {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}, "params=int8"
    ... )
    >>> trainable, frozen = policy.quantized.split_frozen(stored)
    >>> list(trainable), trainable["kernel"], frozen["bias"]
    (['bias', 'kernel'], None, None)

    Args:
      params: a tree of parameters.
      trains: returns whether a parameter is to be trained, given its path, such as
        ``lambda path: "lora" in path``. None: all but the quantized.

    Returns:
      The trainable parameters and the frozen ones; `merge_frozen` puts them together.
    """

    def part(keeps_frozen: bool) -> Any:
        def kept(path: Any, x: Any) -> Any:
            is_frozen = is_quantized(x) or not (trains is None or trains(path_name(path)))
            return x if is_frozen == keeps_frozen else None

        return jax.tree_util.tree_map_with_path(kept, params, is_leaf=is_quantized)

    return part(False), part(True)


def merge_frozen(trainable: Any, frozen: Any) -> Any:
    """Returns the parameters of which `split_frozen` made the two parts.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> stored = policy.quantized.quantize_params({"kernel": jnp.ones((64, 8))}, "params=int8")
    >>> policy.quantized.merge_frozen(*policy.quantized.split_frozen(stored))["kernel"]
    QuantizedArray('int8', (64, 8), float32)

    Args:
      trainable: the first part, updated.
      frozen: the second one.
    """
    return jax.tree.map(
        lambda x, y: y if x is None else x,
        trainable,
        frozen,
        is_leaf=lambda x: x is None or is_quantized(x),
    )
