"""Gradients under a policy and a loss scale: `value_and_grad` and `grad`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from policy.core.arrays import (
    is_inexact,
    is_overwritten,
    is_quantized,
    map_gradients,
    nnx_files,
    path_name,
    working_dtype,
)
from policy.core.messages import FROZEN, dtype_and_shape, shortened, shown, warn_once, ways_out_of
from policy.core.policy import Policy, get_policy
from policy.core.scope import current_policy, use_policy
from policy.grads.float32_sums import with_float32_sums
from policy.grads.loss_scale import (
    LossScale,
    ScaledGradients,
    get_loss_scale,
    note_gradients,
    require_positive,
    scale_tree,
    unscale_tree,
)

T = TypeVar("T")
GradientKind = Literal["float32", "accumulator", "compute"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
) -> Callable[..., tuple[Any, Any]]:
    """Differentiates `loss_fn` as `jax.value_and_grad` does, under a policy and a loss scale.

    The loss is cast to float32 before it is scaled, and returned unscaled; one that `loss_fn`
    computed in 16 bits is told by a `DtypePolicyWarning`. Gradients accumulate over the uses of a
    parameter in float32, even if the parameter is stored in half precision;
    `policy.grads.float32_sums` says how. Leaves under a mapping key `_overwrite_with_gradient`, and
    aux, are left alone.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> loss_fn = lambda params: jnp.sum(jnp.square(params["w"].astype(jnp.float32)))
    >>> params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
    >>> loss, grads = policy.value_and_grad(loss_fn, loss_scale=1024.0)(params)
    >>> float(loss), grads["w"]
    (5.0, Array([2., 4.], dtype=float32))

    Args:
      loss_fn: returns a floating scalar, or with `has_aux` a pair `(loss, aux)`.
      argnums: the positional arguments to differentiate by, as in JAX.
      has_aux: whether `loss_fn` returns a pair.
      policy: a Policy or its text form, in force while `loss_fn` is traced. None keeps the policy
        in force.
      loss_scale: None, a loss scale such as `loss_scale_of(opt_state)`, or a positive number.
      grads: "float32" returns a plain tree: unscaled, float32 (float64 and complex leaves keep
        their dtype). "accumulator" returns the same tree, in which the gradient of a weight is the
        float32 accumulator of its matmul or convolution, where "float32" widens a rounded one; see
        `policy.grads.float32_sums`. "compute" returns `ScaledGradients`: still scaled,
        rounded once, at the end, to the policy's compute_dtype; not rounded if there is no policy
        or its compute_dtype is wider.

    Returns:
      A function of `loss_fn`'s arguments that returns `(loss, gradients)` or `((loss, aux),
      gradients)`.

    Raises:
      ValueError: `grads` is unknown, or the scale not positive or a text such as "dynamic".
      TypeError: `loss_fn` is not a function, or `argnums` are not positions; on the call, the loss
        is not a floating scalar, or an argument to differentiate by holds integers, PRNG keys or
        nnx references.
    """
    _require_loss(loss_fn, argnums)
    finish = Finish(policy, loss_scale, grads)

    @functools.wraps(loss_fn)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = _positions(argnums, len(args))
        for position in positions:
            _require_differentiable(args[position], position)
        with finish.scope():
            (_, (loss, aux)), gradients = with_float32_sums(
                jax.value_and_grad(
                    scaled_loss(loss_fn, finish.scale, has_aux), argnums, has_aux=True
                ),
                positions,
                args,
                kwargs,
                accumulators=grads == "accumulator",
            )
            gradients = finish(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return value_and_gradients


def grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
) -> Callable[..., Any]:
    """Differentiates `loss_fn` as `value_and_grad` does, without returning the loss.

    Arguments and errors as in `value_and_grad`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> loss_fn = lambda w: jnp.sum(jnp.square(w.astype(jnp.float32)))
    >>> policy.grad(loss_fn)(jnp.array([1.0, 3.0], jnp.bfloat16))
    Array([2., 6.], dtype=float32)

    Returns:
      A function that returns the gradients, or with `has_aux` the pair `(gradients, aux)`.
    """
    return without_loss(
        value_and_grad(
            loss_fn, argnums, has_aux, policy=policy, loss_scale=loss_scale, grads=grads
        ),
        has_aux,
    )


def without_loss(differentiated: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a `value_and_grad` that returns the gradients, or with `has_aux` them and aux."""

    @functools.wraps(differentiated)
    def gradients_only(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradients_only


class Finish:
    """Turns raw gradients into unscaled ones or `ScaledGradients`, for both APIs.

    Attributes:
      policy: in force while the loss is traced, or None.
      scale: the () scale, a Python number or an array.
      grads: "float32", "accumulator" or "compute".
      has_scale: whether a loss scale was given.
    """

    def __init__(self, policy: Policy | str | None, loss_scale: Any, grads: GradientKind):
        """Checks the three arguments. Raises as `value_and_grad` says."""
        if grads not in get_args(GradientKind):
            kinds = " or ".join(map(repr, get_args(GradientKind)))
            raise ValueError(f"grads should be {kinds}, but got {grads!r}.")
        self.policy = None if policy is None else get_policy(policy)
        self.scale = _scale_value(loss_scale)
        self.grads, self.has_scale = grads, loss_scale is not None

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.policy is None else use_policy(self.policy)

    def __call__(self, gradients: Any) -> Any:
        if self.grads == "compute":
            policy = current_policy()
            compute_dtype = jnp.dtype(jnp.float32) if policy is None else policy.compute_dtype

            def narrow(gradient: jax.Array) -> jax.Array:
                if not jnp.issubdtype(gradient.dtype, jnp.floating):
                    return gradient
                working = working_dtype(gradient.dtype)
                is_narrower = compute_dtype.itemsize < working.itemsize
                return gradient.astype(compute_dtype if is_narrower else working)

            return ScaledGradients(map_gradients(narrow, gradients), self.scale)
        unscaled = map_gradients(lambda g: unscale_tree(g, self.scale), gradients)
        return note_gradients(unscaled, were_scaled=self.has_scale)


def scaled_loss(loss_fn: Callable[..., Any], scale: ArrayLike, has_aux: bool) -> Callable[..., Any]:
    """Returns `loss_fn` with the result `(scaled float32 loss, (loss, aux))`.

    The new function raises TypeError if the loss is not a floating scalar.
    """

    @functools.wraps(loss_fn)
    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        returned = loss_fn(*args, **kwargs)
        if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
            length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
            raise TypeError(
                "With has_aux=True loss_fn should return a pair (loss, aux), but got "
                f"{type(returned).__name__}{length}."
            )
        loss, aux = returned if has_aux else (returned, None)
        is_number = isinstance(loss, (jax.Array, np.ndarray, np.generic, float, complex))
        if not is_number or jnp.ndim(loss) or not is_inexact(loss):  # JAX takes complex, or not
            raise TypeError(
                f"loss_fn should return a floating scalar, but got {dtype_and_shape(loss)}: return "
                "the mean or the sum, and use has_aux=True to return more."
            )
        loss = jnp.asarray(loss)
        if loss.dtype.itemsize == 2:
            digits = 3 if loss.dtype == jnp.bfloat16 else 4
            warn_once(
                f"loss_fn returned a {loss.dtype.name} loss, of {digits} digits: cast the logits "
                "to float32, logits.astype(jnp.float32), or use policy.losses. A module that "
                "returns a loss needs a policy with output=float32."
            )
        loss = loss.astype(working_dtype(loss.dtype))  # before the scale: float16 ends at 65504
        return scale_tree(loss, scale), (loss, aux)

    return scaled


def _require_loss(loss_fn: Any, argnums: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn should be a function, but got {type(loss_fn).__name__}: pass the function "
            "itself, and its arguments to the result, value_and_grad(loss_fn)(params, batch)."
        )
    positions = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not positions or not all(
        isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions
    ):
        raise TypeError(
            "argnums should be the position of an argument, or several, but got "
            f"{shown(argnums)}: pass arguments to the result, value_and_grad(loss_fn)(params, "
            "batch), and a policy as policy=."
        )


def _scale_value(loss_scale: Any) -> ArrayLike:
    """Returns the () scale, possibly traced, of a number or a loss scale (ours or similar)."""
    if isinstance(loss_scale, str):  # "dynamic" would stay at its first value
        raise ValueError(
            f"loss_scale should be a loss scale or a number, but got {loss_scale!r}: write "
            "mixed_precision(..., loss_scale='dynamic'), and pass "
            "loss_scale=loss_scale_of(opt_state) here."
        )
    if isinstance(loss_scale, (jax.Array, np.ndarray)):
        scale = loss_scale
    elif hasattr(loss_scale, "loss_scale") and not isinstance(loss_scale, type):
        scale = loss_scale.loss_scale
        if hasattr(scale, "adjust"):  # a whole state, or a mixed_precision
            raise TypeError(
                f"loss_scale should be a loss scale, but got a {type(loss_scale).__name__}, which "
                "holds one: pass loss_scale=loss_scale_of(opt_state)."
            )
    else:
        given: Any = loss_scale  # of a class, too: it is rejected by name
        scale = get_loss_scale(given).loss_scale
    require_positive(scale)
    if jnp.ndim(scale):
        raise ValueError(f"loss_scale should be a scalar, but got shape {jnp.shape(scale)}.")
    return scale


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    asked = argnums if isinstance(argnums, Sequence) else (argnums,)
    for position in asked:
        if not -count <= position < count:
            raise TypeError(
                f"argnums={argnums} selects positional argument {position}, but the call has "
                f"{count} positional arguments: pass it by position, not by keyword."
            )
    return tuple(position % count for position in asked)


def _require_differentiable(argument: Any, position: int) -> None:
    references: list[str] = []

    def is_leaf(node: Any) -> bool:
        files = nnx_files(node)
        if files and "flax.nnx.statelib" not in files:  # a State is a plain tree of copies
            references.append(type(node).__name__)
        return bool(files) or is_quantized(node)

    leaves = jax.tree_util.tree_leaves_with_path(argument, is_leaf=is_leaf)
    if references:
        raise TypeError(
            f"Argument {position} holds nnx references ({references[0]}), and the values that "
            "loss_fn writes to them (BatchNorm statistics, RNG counts) would be lost. Use "
            "mpmodules.nnx.value_and_grad, or split the model and pass its state."
        )
    frozen = [path_name(path) for path, leaf in leaves if is_quantized(leaf)]
    if frozen:
        raise TypeError(f"Argument {position} holds {shortened(frozen)}, {FROZEN}")
    wrong = [
        f"{path_name(path)} ({dtype_and_shape(leaf)})"
        for path, leaf in leaves
        if not (is_leaf(leaf) or is_overwritten(path))
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex)))
        or not is_inexact(leaf)
    ]
    if wrong:
        raise TypeError(
            f"Argument {position} holds leaves that have no gradient: {', '.join(wrong)}. Pass "
            "integers, booleans and PRNG keys as another argument, outside of argnums."
            + ways_out_of(leaf for _, leaf in leaves if not is_leaf(leaf))
        )
