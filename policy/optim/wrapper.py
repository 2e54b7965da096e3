"""`mixed_precision` runs an optax transform in float32; `apply_gradients` takes a step with it;
`match_updates` casts the updates of a transform.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from policy.core.arrays import path_name
from policy.core.dtypes import dtype_or_none
from policy.core.messages import dtype_and_shape, shortened, warn_once
from policy.core.policy import Policy, get_policy
from policy.grads.loss_scale import DynamicLossScale, LossScale, get_loss_scale
from policy.optim.host_memory import MemoryKind
from policy.optim.moments import get_moment_dtypes
from policy.optim.state import MixedPrecisionState, require_transform
from policy.optim.step import Stepper
from policy.optim.storage_modes import STORAGE_MODES, MasterWeights

Params = TypeVar("Params")


def mixed_precision(
    tx: optax.GradientTransformation | optax.MultiSteps,
    policy: Policy | str,
    *,
    loss_scale: LossScale | str | ArrayLike | None = None,
    master_weights: MasterWeights | None = "auto",
    moment_dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    clip_global_norm: float | None = None,
    key: jax.Array | None = None,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    skip_nonfinite: bool = True,
    state_memory_kind: MemoryKind | None = None,
) -> MixedPrecision:
    """Wraps an optax transform so that it sees float32 gradients and float32 params.

    A step whose gradients hold a NaN, an infinity, or a number whose float32 square is infinite is
    skipped: params, the inner state, masters and counts stay; only `skipped`, `finite` and the loss
    scale change. Clipping, schedules, `optax.MultiSteps`, `masked`, `partition` and so on go
    inside; `init` raises where one of them calls it. A state of another storage mode,
    moment_dtype, kind of loss scale or transform is rejected; `convert` migrates it. docs/faults.md
    lists all faults: those that are skipped, rejected and not checked.

    Args:
      tx: any optax transform, or `optax.MultiSteps` around one.
      policy: a Policy or its text form.
      loss_scale: None, "dynamic", a positive number or a loss scale: the first value of
        `loss_scale_of(state)`. There is no default, as the loss must be scaled too; None where the
        compute_dtype is float16 warns.
      master_weights: the storage mode of float32 values of bfloat16 and float16 params, in bytes an
        element beside them. A param that is float32 or wider is its own master, always.
        "auto": "remainder" for bfloat16, "full" for float16.
        "full": +4, a float32 master.
        "remainder": +2, the low 16 bits of that master, whose high half is the param; bfloat16
        only. The same numbers as "full", bit for bit.
        "stochastic": +0, each step is rounded up or down by chance, right on average; needs `key`.
        "none" or None: +0, each step is rounded to nearest, and steps below half an ulp are lost.
      moment_dtype: the dtype that moments are stored in; they are computed in float32. A dtype
        means the first moments (`mu`, `m`, `trace`, `ema`, `exp_avg`); any other field goes by
        name, `{"mu": "bfloat16", "nu": "bfloat16"}`. With a `key` they are rounded stochastically,
        which a bfloat16 second moment needs where b2 is above .98. "int8" stores codes of the
        moment's shape, and a float32 scale for each block of 128 in its last axis: 2.06 bytes an
        element for both moments of Adam. It needs a `key`, unless a step keeps less than .69 of a
        moment. Moments of fewer than 4096 elements, or with a last axis shorter than 16, stay
        float32. A block that holds a NaN or an infinity is NaN.
      clip_global_norm: the largest global norm of the true gradients that is let through. The norm
        is the flag too: a step whose squares overflow float32 (norms from 1.8e19 on) is skipped.
      key: a JAX PRNG key that stochastic rounding draws from, with the step and the leaf folded in.
      axis_name: mapped axes that gradients are sharded over, where their types don't say so: under
        `jax.vmap` and `jax.shard_map(check_vma=False)`. The flag and the global norm are taken over
        them.
      skip_nonfinite: False applies every step, finite or not: 4 bytes an element less memory
        traffic. `finite` stays True, unless masters were restored from another storage mode.
      state_memory_kind: "pinned_host" stores the moments, their scales and the masters in the
        host's memory; each step copies them to the device and back. Scalars and
        arrays of 8 or fewer bits an element stay on the device.
        Give `state_shardings(tx, params)` as the step's and init's `out_shardings`.

    Returns:
      A `MixedPrecision`. Step with `apply_gradients`, or through optax's own contract.

    Raises:
      ValueError: an argument's value breaks its rule. `init` raises it where the device has no
        memory of `state_memory_kind`, or `moment_dtype` names no field of the state, or one that
        can't be narrow: copies of params, running sums, means that would never decay.
      TypeError: `tx` is no transform, `policy` no policy, or `key` no key. `init` raises it inside
        of an optax transform.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import apply_gradients, mixed_precision
      >>> tx = mixed_precision(optax.adam(0.1), "bfloat16")
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> opt_state = tx.init(params)
      >>> grads = {"w": jnp.ones(2)}
      >>> params, opt_state, finite = apply_gradients(tx, params, opt_state, grads)
      >>> params["w"]
      Array([0.898438, 0.898438], dtype=bfloat16)
    """
    is_number = isinstance(clip_global_norm, float | int | np.number | jax.Array)
    if clip_global_norm is not None and not (is_number and 0 < clip_global_norm < np.inf):
        raise ValueError(
            f"clip_global_norm should be a positive finite number, but got {clip_global_norm!r}."
        )
    inner, moment_dtypes = _inner_of(tx), get_moment_dtypes(moment_dtype)
    if state_memory_kind not in (None, "pinned_host"):
        raise ValueError(
            f"state_memory_kind should be 'pinned_host' or None, but got {state_memory_kind!r}."
        )
    _check_key(key, master_weights, moment_dtypes is not None)
    scale, policy = get_loss_scale(loss_scale), get_policy(policy)
    _check_scale(scale, loss_scale is not None, policy, skip_nonfinite)
    axes = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    stepper = Stepper(
        inner=inner,
        policy=policy,
        loss_scale=scale,
        master_weights=master_weights or "none",
        moment_dtypes=moment_dtypes,
        clip_global_norm=None if clip_global_norm is None else float(clip_global_norm),
        key=key,
        axis_name=() if axis_name is None else tuple(axes),
        skip_nonfinite=bool(skip_nonfinite),
        state_memory_kind=state_memory_kind,
    )
    # optax types trees as a closed set of containers; ours may hold any registered node
    return MixedPrecision(
        cast("optax.TransformInitFn", stepper.init), cast("optax.TransformUpdateFn", stepper.update)
    )


def _inner_of(tx: Any) -> optax.GradientTransformationExtraArgs:
    require_transform(tx, "mixed_precision(optax.adamw(1e-3), 'mixed_bfloat16')")
    if isinstance(tx, MixedPrecision):
        raise ValueError(
            "tx is a mixed_precision already: wrap it only once, as in mixed_precision(tx, policy)."
        )
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def _check_scale(scale: LossScale, is_given: bool, policy: Policy, skip_nonfinite: bool) -> None:
    if not skip_nonfinite and isinstance(scale, DynamicLossScale):
        raise ValueError(
            "A dynamic loss scale is adjusted when gradients overflow, which skip_nonfinite=False "
            "does not check: leave skip_nonfinite=True, or pass a fixed loss_scale."
        )
    if not is_given and policy.compute_dtype == jnp.float16:
        warn_once(
            f"mixed_precision has no loss scale under '{policy}': float16 gradients below 6e-8 "
            "become 0, and their steps are lost. Pass loss_scale='dynamic' here and "
            "loss_scale=loss_scale_of(opt_state) to value_and_grad, or loss_scale=NoOpLossScale() "
            "to train without one."
        )


def _check_key(key: Any, master_weights: MasterWeights | None, narrow_moments: bool) -> None:
    modes = ("auto", *STORAGE_MODES)
    if master_weights not in (*modes, None):
        names = ", ".join(map(repr, modes))
        raise ValueError(
            f"master_weights should be one of {names} or None, but got {master_weights!r}."
        )
    needs_key = master_weights == "stochastic"
    if needs_key and key is None:
        raise ValueError(
            f"master_weights={master_weights!r} needs a key: mixed_precision(..., "
            "key=jax.random.key(0))."
        )
    if key is None:
        return
    if not needs_key and not narrow_moments:
        raise ValueError(
            f"key is for stochastic rounding, but master_weights is {master_weights!r} and "
            "moment_dtype is None, so nothing is rounded that way: leave key out."
        )
    dtype = getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (key.ndim == 0 if is_typed else dtype == jnp.uint32 and key.ndim == 1):
        raise TypeError(
            "key should be one JAX PRNG key, such as jax.random.key(0), but got "
            f"{dtype_and_shape(key)}."
        )


class MixedPrecision(optax.GradientTransformationExtraArgs):
    """An optax transform that `mixed_precision` made, whose options can be read.

    Attributes:
      inner: the wrapped transform.
      policy: the policy.
      loss_scale: the loss scale of a new state; the current one is `loss_scale_of(state)`.
      master_weights: the storage mode of float32 values, or "auto".
      moment_dtypes: field name to the dtype that it is stored in, "" for the first moments; or
        None.
      clip_global_norm: the largest global norm let through, or None.
      key: the key of stochastic rounding, or None.
      axis_name: the mapped axes that were named.
      skip_nonfinite: True where a step with non-finite gradients is skipped.
      state_memory_kind: "pinned_host" where the state lies in the host's memory, or None.

    Example:

      >>> import optax
      >>> from policy import mixed_precision
      >>> from policy.optim import MixedPrecision
      >>> tx = mixed_precision(optax.adam(1e-3), "mixed_bfloat16", clip_global_norm=1.0)
      >>> isinstance(tx, MixedPrecision)
      True
      >>> tx.master_weights, tx.clip_global_norm
      ('auto', 1.0)
    """

    init: Callable[[Any], MixedPrecisionState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Callable[..., tuple[Any, MixedPrecisionState]]  # pyright: ignore[reportIncompatibleVariableOverride]
    inner: optax.GradientTransformationExtraArgs
    policy: Policy
    loss_scale: LossScale
    master_weights: MasterWeights
    moment_dtypes: dict[str, np.dtype] | None
    clip_global_norm: float | None
    key: jax.Array | None
    axis_name: tuple[Hashable, ...]
    skip_nonfinite: bool
    state_memory_kind: MemoryKind | None

    __slots__ = ()

    @property
    def stepper(self) -> Stepper:
        """The options, and the functions that init and step with them."""
        # Not an attribute: a tuple that JAX or a copy rebuilds has its two functions only, which
        # are bound to it.
        return getattr(self.init, "__self__")  # noqa: B009

    def __getattr__(self, name: str) -> Any:
        if name not in MixedPrecision.__annotations__:
            raise AttributeError(f"MixedPrecision has no attribute {name!r}.", name=name, obj=self)
        return getattr(self.stepper, name)


def apply_gradients(
    tx: optax.GradientTransformation, params: Params, state: Any, grads: Any, **extra_args: Any
) -> tuple[Params, MixedPrecisionState, jax.Array]:
    """Takes one optimizer step, or skips it.

    Params, masters and the inner state go through one `lax.cond`: a step with non-finite gradients
    returns them as they are. Safe to donate `params` and `state`. Outside of `jax.jit` the step is
    compiled too, once for each shape: the inner transform's Python code runs when it is traced.

    Args:
      tx: the transform that `mixed_precision` returned; nothing around it.
      params: a tree of floating arrays. Leaves under `_overwrite_with_gradient` take their gradient
        as their value.
      state: the `MixedPrecisionState` that `tx.init(params)` made.
      grads: a plain tree of true gradients, or `ScaledGradients`, divided by the scale that they
        carry. For `optax.contrib.dpsgd` they are per example, with an axis in front of each; for
        `optax.lookahead`, whose params are an `optax.LookaheadParams`, those of its fast params.
      **extra_args: handed to the inner transform's update.

    Returns:
      The params in their own dtypes, equal to the rounded masters; the state; a () bool that gates
      user state (`select_tree`).

    Raises:
      TypeError: `tx` or `state` is not `mixed_precision`'s own, or arguments are in another order.
      ValueError: trees, shapes or dtypes don't fit.

    Example:

      >>> import jax, jax.numpy as jnp, optax
      >>> from policy import apply_gradients, mixed_precision
      >>> tx = mixed_precision(optax.sgd(0.5), "mixed_bfloat16")
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = tx.init(params)
      >>> grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
      >>> params, opt_state, finite = apply_gradients(tx, params, opt_state, grads)
      >>> params["w"], finite
      (Array([0., 0.], dtype=float32), Array(True, dtype=bool))
    """
    stepper = require_mixed_precision(tx).stepper
    new, state = stepper.step(grads, state, params, extra_args, as_updates=False)
    return cast("Params", new), state, state.finite


def require_mixed_precision(tx: optax.GradientTransformation) -> MixedPrecision:
    """Returns `tx` if `mixed_precision` made it.

    Raises:
      TypeError: by the transform's type, if it is another's.
    """
    if isinstance(tx, MixedPrecision):
        return tx
    raise TypeError(
        f"tx should be a mixed_precision transform, but got {type(tx).__name__}. Put "
        "mixed_precision outermost, mixed_precision(optax.chain(...), policy), and call "
        "apply_gradients(tx, params, opt_state, grads)."
    )


def match_updates(
    tx: optax.GradientTransformation,
    to: Literal["grads", "params"] | DTypeLike,
    *,
    strict: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Casts the floating updates of any optax transform: to its gradients' dtypes, params', or one.

    Optax's transforms return the dtypes that their moments and the gradients promote to: Adam with
    float32 moments returns float32 updates for bfloat16 gradients, and bfloat16 ones with bfloat16
    moments. Where the dtypes agree already the program is the same as without. The state is the
    transform's own, and everything before the cast is computed as without: half-precision moments
    stay as wrong as they were. `mixed_precision` is for those.

    Args:
      tx: any optax transform.
      to: "grads", "params" (which `update` then needs) or a floating dtype for all of them.
      strict: rejects a cast that can lose something (float32 to bfloat16, float16 to bfloat16)
        instead of doing it.

    Returns:
      A transform with the state of `tx`. Updates are cast to a real dtype only where they are real.

    Raises:
      TypeError: `tx` is no transform. From `update`, with `strict`: a cast is lossy, by the paths
        of the leaves.
      ValueError: `to` is no floating dtype. From `update`: `to` is "params" and there are none.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy.optim import match_updates
      >>> tx = match_updates(optax.sgd(0.5), "bfloat16")
      >>> params = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
      >>> updates["w"]
      Array([-0.5, -0.5], dtype=bfloat16)
    """
    require_transform(tx, "match_updates(tx, to)")
    is_tree = isinstance(to, str) and to in ("grads", "params")
    target: Any = to if is_tree else _floating(to)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        like: Any = {"grads": updates, "params": params}.get(target) if is_tree else target
        if like is None:
            raise ValueError(
                "match_updates(to='params') needs params: call update(gradients, state, params)."
            )
        updates, state = inner.update(updates, state, params, **extra_args)
        likes = like if is_tree else jax.tree.map(lambda _: like, updates)
        dtypes = jax.tree.map(lambda x, one: _dtype_of(x.dtype, one), updates, likes)
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(dtypes), strict=True
        )
        lossy = [
            f"{path_name(path)} from {x.dtype} to {dtype}"
            for (path, x), dtype in pairs
            if x.dtype != dtype and not _holds(dtype, x.dtype)
        ]
        if strict and lossy:
            raise TypeError(
                f"match_updates would lose digits or range: {shortened(lossy)}. Ask for a wider "
                "dtype, or leave strict out."
            )
        return jax.tree.map(lambda x, dtype: x.astype(dtype), updates, dtypes), state

    return optax.GradientTransformationExtraArgs(inner.init, cast("Any", update))


def _floating(to: DTypeLike | None) -> np.dtype:
    dtype = dtype_or_none(to)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"to should be 'grads', 'params' or a floating dtype, but got {to!r}.")
    return dtype


def _dtype_of(source: DTypeLike, like: Any) -> Any:
    """Returns the dtype of `like`, or `source` where one of both is real and the other is not."""
    dtype = jnp.result_type(like)
    kinds = jnp.floating, jnp.complexfloating
    same_kind = any(jnp.issubdtype(source, k) and jnp.issubdtype(dtype, k) for k in kinds)
    return dtype if same_kind else source


def _holds(wide: DTypeLike, narrow: DTypeLike) -> bool:
    """Returns whether every value of one floating dtype is one of the other."""
    more, less = jnp.finfo(wide), jnp.finfo(narrow)
    return more.nmant >= less.nmant and more.maxexp >= less.maxexp and more.minexp <= less.minexp
