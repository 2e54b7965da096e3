"""`mixed_precision`: one outer wrapper around any optax transform, which is right in float32 and often wrong elsewhere.

The order is always: cast to float32, unscale, one finiteness flag for all gradients, clip, the inner transform, master
weights, round to the param's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from policy.gradients import ScaledGradients
from policy.loss_scale import LossScale, all_finite, fusion_barrier, get_loss_scale, unscale_tree
from policy.optim.checks import check_gradients, check_number, check_params, is_transform
from policy.optim.clip import clip_by_global_norm, mapped_axes
from policy.optim.masters import check_layout, layout_of, make_masters, round_to, widen, without_overwritten
from policy.optim.state import MasterWeights, MixedPrecisionState, states_in, strong
from policy.policy import Policy, get_policy
from policy.trees import is_overwritten, working_dtype


def mixed_precision(
    tx: optax.GradientTransformation,
    policy: Policy | str,
    *,
    loss_scale: LossScale | str | ArrayLike | None = None,
    master_weights: MasterWeights | None = "auto",
    moment_dtype: DTypeLike | dict[str, DTypeLike] | None = None,
    clip_global_norm: float | None = None,
    key: jax.Array | None = None,
    axis_name: Hashable | Sequence[Hashable] | None = None,
) -> MixedPrecision:
    """Wraps an optax transform so that it sees float32 gradients and float32 params, whatever those are stored in.

    A step whose gradients hold a NaN or an infinity is skipped: params, the inner state, masters and counts stay, only
    `skipped`, `finite` and the loss scale move. Clip, schedules, `optax.MultiSteps`, `masked` and so on go inside.

    Args:
      tx: any optax transform.
      policy: a Policy or its text form.
      loss_scale: None, "dynamic", a positive number or a loss scale. What `loss_scale_of(state)` starts with.
      master_weights: "full" keeps a float32 master of each bfloat16 and float16 param, "none" (or None) keeps none
        and rounds after each step, "auto" is "full". A param that is float32 or wider is its own master, always.
      moment_dtype: not available in this version.
      clip_global_norm: the largest global norm of the true gradients that is let through.
      key: not available in this version: only stochastic rounding needs it.
      axis_name: mapped axes that gradients are sharded over, where their types don't say so: under `jax.vmap` and
        `jax.shard_map(check_vma=False)`. The flag and the global norm are taken over them.

    Returns:
      A `MixedPrecision`. Step with `apply_gradients`, or through optax's own contract.

    Raises:
      ValueError: an argument's value breaks its rule, or is not available in this version.
      TypeError: `tx` is no transform, or `policy` no policy.
    """
    if not is_transform(tx):
        raise TypeError(f"tx should be an optax transform, but got {type(tx).__name__}.")
    if isinstance(tx, MixedPrecision):
        raise ValueError("tx is a mixed_precision already: wrap once, as in mixed_precision(tx, policy).")
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    for name, value in (("moment_dtype", moment_dtype), ("key", key)):
        if value is not None:
            raise ValueError(f"{name} is not available in this version: leave it None.")
    if master_weights in ("remainder", "kahan", "stochastic"):
        raise ValueError(f"master_weights={master_weights!r} is not available in this version: use 'full'.")
    if master_weights not in ("auto", "full", "none", None):
        raise ValueError(f"master_weights should be 'auto', 'full', 'none' or None, but got {master_weights!r}.")
    names = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    recipe = Recipe(
        inner=optax.with_extra_args_support(tx),
        policy=get_policy(policy),
        loss_scale=get_loss_scale(loss_scale),
        master_weights=master_weights or "none",
        clip_global_norm=None if clip_global_norm is None else check_number("clip_global_norm", clip_global_norm),
        axis_name=names,
    )
    # optax types trees as a closed set of containers; ours may hold any registered node
    return MixedPrecision(cast("optax.TransformInitFn", recipe.init), cast("optax.TransformUpdateFn", recipe.update))


class MixedPrecision(optax.GradientTransformationExtraArgs):
    """What `mixed_precision` returns: an optax transform whose parts can be read."""

    init: Callable[[Any], MixedPrecisionState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Callable[..., tuple[Any, MixedPrecisionState]]  # pyright: ignore[reportIncompatibleVariableOverride]

    __slots__ = ()

    @property
    def recipe(self) -> Recipe:
        """The parts, and what they do."""
        # Not an attribute: a tuple that JAX or a copy rebuilds has its two functions only, which are bound to it.
        return getattr(self.init, "__self__")  # noqa: B009

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped transform."""
        return self.recipe.inner

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.recipe.policy

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale that a new state starts with. The current one is `loss_scale_of(state)`."""
        return self.recipe.loss_scale

    @property
    def master_weights(self) -> MasterWeights:
        """How masters are kept."""
        return self.recipe.master_weights

    @property
    def clip_global_norm(self) -> float | None:
        """The largest global norm let through, or None."""
        return self.recipe.clip_global_norm

    @property
    def axis_name(self) -> tuple[Hashable, ...]:
        """The mapped axes that were named."""
        return self.recipe.axis_name


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """The parts of a `MixedPrecision`, checked, and its functions."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy
    loss_scale: LossScale
    master_weights: MasterWeights
    clip_global_norm: float | None
    axis_name: tuple[Hashable, ...]

    def init(self, params: optax.Params) -> MixedPrecisionState:
        """A state for `params`. Raises ValueError where a param can't be stepped."""
        check_params(params)
        params = without_overwritten(params)
        return self.make_state(params, make_masters(params, self.master_weights))

    def make_state(self, params: Any, masters: Any) -> MixedPrecisionState:
        """A state for params without their overwritten leaves, and their masters."""
        wide = widen(params, masters)
        inner = _run_optax(self.inner.init, wide)
        if states_in(inner):
            raise ValueError(
                "tx holds a mixed_precision already: wrap once, outermost, as in "
                "mixed_precision(optax.chain(...), policy)."
            )
        seen = {id(leaf) for leaf in jax.tree.leaves((params, wide))}
        return MixedPrecisionState(
            inner=jax.tree.map(lambda leaf: _settled(leaf, seen), inner),
            loss_scale=jax.tree.map(strong, self.loss_scale),
            finite=jnp.array(True),
            skipped=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            masters=masters,
            layout=layout_of(params, self.master_weights),
        )

    def update(
        self, updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        """Optax's contract: what `optax.apply_updates` makes of the returned float32 updates is the rounded master."""
        differences, new_state = self.step(updates, state, params, extra_args, _differences, _no_differences)
        overwrite = lambda p, g: jnp.where(new_state.finite, g - p, jnp.zeros_like(p))  # noqa: E731
        return _with_overwritten(differences, params, updates, overwrite), new_state

    def apply(
        self, params: Any, state: Any, gradients: Any, extra_args: dict[str, Any]
    ) -> tuple[Any, MixedPrecisionState]:
        """The new params themselves, and the state."""
        rounded, state = self.step(gradients, state, params, extra_args, _rounded, lambda params: params)
        overwrite = lambda p, g: jnp.where(state.finite, g, p)  # noqa: E731
        return _with_overwritten(rounded, params, gradients, overwrite), state

    def step(
        self,
        gradients: Any,
        state: Any,
        params: Any,
        extra_args: dict[str, Any],
        applied: Callable[[Any, Any, Any], Any],
        skipped: Callable[[Any], Any],
    ) -> tuple[Any, MixedPrecisionState]:
        """One step. Returns `applied(params, new wide params, updates)` or `skipped(params)`, and the state."""
        scale: ArrayLike = 1.0
        if isinstance(gradients, ScaledGradients):
            gradients, scale = gradients.tree, gradients.scale
        check_gradients(gradients, state, params)
        params, gradients = without_overwritten(params), without_overwritten(gradients)
        check_layout(params, state)
        finite = self.agreed_finite(_true_gradients(gradients, scale, params))

        # Cast and unscale come again inside: they fuse into what reads them, and a skipped step pays for the flag only.
        def apply_step(operands: tuple[Any, Any, Any, Any]) -> Any:
            params, gradients, inner, masters = operands
            wide = widen(params, masters)
            updates, inner = self.inner_step(_true_gradients(gradients, scale, params), inner, wide, extra_args)
            new_wide = jax.tree.map(jnp.add, wide, updates)
            masters = jax.tree.map(
                lambda _, m, w: m if isinstance(m, optax.MaskedNode) else w, params, masters, new_wide
            )
            return applied(params, new_wide, updates), inner, masters

        def skip_step(operands: tuple[Any, Any, Any, Any]) -> Any:
            params, _, inner, masters = operands
            return skipped(params), inner, masters

        operands = (params, gradients, state.inner, state.masters)
        result, inner, masters = lax.cond(finite, apply_step, skip_step, operands)
        step = finite.astype(jnp.int32)
        return result, state._replace(
            inner=inner,
            loss_scale=state.loss_scale.adjust(finite),
            finite=finite,
            skipped=state.skipped + (jnp.int32(1) - step),
            count=state.count + step,
            masters=masters,
        )

    def agreed_finite(self, gradients: Any) -> jax.Array:
        """() bool, the same on every device: whether all true gradients are finite."""
        finite = all_finite(gradients)
        axes = frozenset().union(*mapped_axes(gradients, self.axis_name))
        if axes:
            finite = lax.pmin(finite.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0
        return fusion_barrier(finite)

    def inner_step(self, gradients: Any, inner: Any, wide: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        """Clip, and the inner transform: float32 updates, and its state in the types that it had."""
        if self.clip_global_norm is not None:
            gradients = clip_by_global_norm(gradients, self.clip_global_norm, self.axis_name)
        updates, new_inner = _run_optax(self.inner.update, gradients, inner, wide, **extra_args)
        if jax.tree.structure(new_inner) != jax.tree.structure(inner):
            raise ValueError(
                "tx can't be wrapped: its update changed the tree of its state, "
                f"from {jax.tree.structure(inner)} to {jax.tree.structure(new_inner)}."
            )
        updates = jax.tree.map(lambda w, u: jnp.asarray(u).astype(w.dtype), wide, updates)
        return updates, jax.tree.map(_keep_type, new_inner, inner)


def _true_gradients(gradients: Any, scale: ArrayLike, params: Any) -> Any:
    """Unscaled, in float32, or in the dtype of a param that is wider."""
    return jax.tree.map(lambda g, p: g.astype(working_dtype(p.dtype)), unscale_tree(gradients, scale), params)


def _rounded(params: Any, wide: Any, updates: Any) -> Any:
    del updates
    return jax.tree.map(lambda p, w: round_to(w, p.dtype), params, wide)


def _differences(params: Any, wide: Any, updates: Any) -> Any:
    """What `optax.apply_updates` should add: the update, or the way from a narrow param to its new rounded value."""

    def one(p: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        return u if p.dtype == w.dtype else round_to(w, p.dtype).astype(w.dtype) - p.astype(w.dtype)

    return jax.tree.map(one, params, wide, updates)


def _no_differences(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.zeros_like(p, working_dtype(p.dtype)), params)


def _with_overwritten(result: Any, params: Any, gradients: Any, overwrite: Callable[[Any, Any], Any]) -> Any:
    """`result` with its empty nodes filled: an overwritten leaf's gradient is its new value, scaled by nothing."""
    gradients = gradients.tree if isinstance(gradients, ScaledGradients) else gradients
    return jax.tree_util.tree_map_with_path(
        lambda path, p, g, r: overwrite(p, g) if is_overwritten(path) else r, params, gradients, result
    )


def _run_optax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Optax relies on JAX's own promotion (adam: a Python float to the power of an int32 count), also where a program
    # asks for strict.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*args, **kwargs)


def _settled(leaf: Any, seen: set[int]) -> Any:
    """A state leaf as it stays: strongly typed, and sharing its buffer with no param and no other leaf."""
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).weak_type or id(leaf) in seen:
        return strong(leaf)
    seen.add(id(leaf))
    return leaf


def _keep_type(new: Any, old: Any) -> Any:
    return new if jnp.issubdtype(old.dtype, jax.dtypes.extended) else lax.convert_element_type(new, old.dtype)
