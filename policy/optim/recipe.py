"""The parts of a `mixed_precision`, and the step that they make.

The order is always: cast to float32, unscale, one finiteness flag for all gradients, clip, the inner transform, master
weights, round to the param's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from policy.gradients import ScaledGradients
from policy.loss_scale import LossScale, all_finite_unscaled, fusion_barrier, unscale_by_reciprocal
from policy.optim.checks import check_gradients, check_params, check_stepped, differentiated, per_example
from policy.optim.clip import clip_to_norm, global_norm, mapped_axes
from policy.optim.delivery import Delivery
from policy.optim.masters import check_layout, layout_of, make_masters, widen, without_overwritten
from policy.optim.moments import check_moments, moment_targets, narrow_moments, widen_moments
from policy.optim.state import MixedPrecisionState, states_in, strong
from policy.optim.storage import PACKED, MasterWeights
from policy.policy import Policy
from policy.trees import is_overwritten, working_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """The parts of a `MixedPrecision`, checked, and its functions."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy
    loss_scale: LossScale
    master_weights: MasterWeights
    moment_dtypes: dict[str, np.dtype] | None
    clip_global_norm: float | None
    key: jax.Array | None
    axis_name: tuple[Hashable, ...]
    skip_nonfinite: bool

    def init(self, params: optax.Params) -> MixedPrecisionState:
        """A state for `params`. Raises ValueError where a param can't be stepped."""
        check_params(params)
        params = without_overwritten(params)
        return self.make_state(params, make_masters(params, self.master_weights))

    def make_state(self, params: Any, masters: Any) -> MixedPrecisionState:
        """A state for params without their overwritten leaves, and their masters."""
        layout = layout_of(params, self.master_weights)
        wide = widen(params, masters, self.master_weights)
        inner = _run_optax(self.inner.init, wide)
        if states_in(inner):
            raise ValueError(
                "tx holds a mixed_precision already: wrap once, outermost, as in "
                "mixed_precision(optax.chain(...), policy)."
            )
        if self.moment_dtypes is not None:
            _run_optax(check_moments, self.inner, inner, params, self.moment_dtypes, self.key is not None)
            inner = narrow_moments(inner, moment_targets(inner, params, self.moment_dtypes))
        seen = {id(leaf) for leaf in jax.tree.leaves((params, wide, masters))}
        return MixedPrecisionState(
            inner=jax.tree.map(lambda leaf: _settled(leaf, seen), inner),
            loss_scale=jax.tree.map(strong, self.loss_scale),
            finite=jnp.array(True),
            skipped=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            masters=masters,
            layout=layout,
        )

    def update(
        self, updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        """Optax's contract: what `optax.apply_updates` makes of the returned float32 updates is the rounded master."""
        differences, new_state = self.step(updates, state, params, extra_args, as_updates=True)
        overwrite = lambda p, g: jnp.where(new_state.finite, g - p, jnp.zeros_like(p))  # noqa: E731
        return _with_overwritten(differences, params, updates, overwrite), new_state

    def apply(
        self, params: Any, state: Any, gradients: Any, extra_args: dict[str, Any]
    ) -> tuple[Any, MixedPrecisionState]:
        """The new params themselves, and the state."""
        rounded, state = self.step(gradients, state, params, extra_args, as_updates=False)
        overwrite = lambda p, g: jnp.where(state.finite, g, p)  # noqa: E731
        return _with_overwritten(rounded, params, gradients, overwrite), state

    def step(
        self, gradients: Any, state: Any, params: Any, extra_args: dict[str, Any], *, as_updates: bool
    ) -> tuple[Any, MixedPrecisionState]:
        """One step: the new params, or what to add to the old ones, and the state."""
        scale: ArrayLike | None = None
        if isinstance(gradients, ScaledGradients):
            gradients, scale = gradients.tree, gradients.scale
        check_gradients(gradients, state, params)
        params, gradients = without_overwritten(params), without_overwritten(gradients)
        check_layout(params, state)
        if self.clip_global_norm is not None and per_example(gradients, params):
            raise ValueError(
                "clip_global_norm clips one gradient, but gradients are per example, and what takes them clips each: "
                "leave it out."
            )
        norm = None
        if self.clip_global_norm is not None:
            norm = global_norm(_true_gradients(gradients, scale, params), self.axis_name)
        leaves, tree = jax.tree.flatten(params)
        deliveries = [Delivery.of(leaf, self.master_weights, as_updates) for leaf in leaves]

        # Cast and unscale come again inside: they fuse into what reads them, and a skipped step pays for the flag only.
        def apply_step(operands: tuple[Any, Any, Any, Any]) -> Any:
            params, gradients, inner, masters = operands
            wide = widen(params, masters, self.master_weights)
            true = _true_gradients(gradients, scale, params)
            if norm is not None and self.clip_global_norm is not None:
                true = clip_to_norm(true, norm, self.clip_global_norm)
            updates, inner = self.inner_step(true, inner, wide, state.count, extra_args)
            new = jax.tree.leaves(jax.tree.map(jnp.add, wide, updates))
            each = (
                deliveries,
                jax.tree.leaves(params),
                new,
                jax.tree.leaves(updates),
                self.rounding_keys(new, state.count),
            )
            return [d.applied(p, w, u, key) for d, p, w, u, key in zip(*each, strict=True)], inner

        def skip_step(operands: tuple[Any, Any, Any, Any]) -> Any:
            params, _, inner, masters = operands
            each = deliveries, jax.tree.leaves(params), tree.flatten_up_to(masters)
            return [d.skipped(p, kept) for d, p, kept in zip(*each, strict=True)], inner

        operands = (params, gradients, jax.tree.map(_strengthened, state.inner), state.masters)
        if self.skip_nonfinite:
            # one look at the gradients serves both: a norm is finite where all of them are
            finite = self.agreed_finite(gradients, scale) if norm is None else fusion_barrier(jnp.isfinite(norm))
            if as_updates:
                held, inner = _step_by_platform(finite, apply_step, skip_step, operands)
            else:
                held, inner = _unpacked_by_platform(deliveries, finite, apply_step, skip_step, operands)
        elif any(d.kind in PACKED for d in deliveries):
            finite = state.finite
            # always true, which XLA can't know: a branch is what it computes a packed pair in one pass for
            held, inner = _unpacked_by_platform(deliveries, state.count >= 0, apply_step, skip_step, operands)
        else:
            finite = state.finite
            held, inner = apply_step(operands)
        results = [d.result(h, p) for d, h, p in zip(deliveries, held, leaves, strict=True)]
        step = finite.astype(jnp.int32)
        return jax.tree.unflatten(tree, [result for result, _ in results]), state._replace(
            inner=inner,
            loss_scale=state.loss_scale.adjust(finite),
            finite=finite,
            skipped=state.skipped + (jnp.int32(1) - step),
            count=state.count + step,
            masters=jax.tree.unflatten(tree, [kept for _, kept in results]),
        )

    def agreed_finite(self, gradients: Any, scale: ArrayLike | None) -> jax.Array:
        """() bool, the same on every device: whether all true gradients are finite."""
        finite = all_finite_unscaled(gradients, scale)
        axes = frozenset().union(*mapped_axes(gradients, self.axis_name))
        if axes:
            finite = lax.pmin(finite.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0
        return finite

    def inner_step(
        self, gradients: Any, inner: Any, wide: Any, count: jax.Array, extra_args: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The inner transform: float32 updates, and its state in the types that it had."""
        targets = None if self.moment_dtypes is None else moment_targets(inner, wide, self.moment_dtypes)
        computed = inner if targets is None else widen_moments(inner, targets)
        updates, new_inner = _run_optax(self.inner.update, gradients, computed, wide, **extra_args)
        check_stepped(self.inner, gradients, updates, wide, new_inner, inner)
        updates = jax.tree.map(lambda w, u: jnp.asarray(u).astype(w.dtype), wide, updates)
        if targets is not None:
            keys = self.rounding_keys(jax.tree.leaves(new_inner), count, first=len(jax.tree.leaves(wide)))
            new_inner = narrow_moments(new_inner, targets, keys)
        return updates, jax.tree.map(_keep_type, new_inner, inner)

    def rounding_keys(self, leaves: list[jax.Array], count: jax.Array, first: int = 0) -> list[Any]:
        """A key for each leaf, step and part of a sharded leaf; None for each where nothing is rounded by chance.

        Leaves are numbered from `first` on. One that is the same on every device is rounded the same way on each.
        """
        if self.key is None:
            return [None] * len(leaves)
        key, keys = jax.random.fold_in(self.key, count), []
        for number, axes in enumerate(mapped_axes(leaves, self.axis_name), first):
            leaf_key = jax.random.fold_in(key, number)
            for axis in sorted(axes, key=str):
                leaf_key = jax.random.fold_in(leaf_key, lax.axis_index(axis))
            keys.append(leaf_key)
        return keys


def _step_by_platform(finite: jax.Array, apply_step: Any, skip_step: Any, operands: Any) -> Any:
    """`lax.cond`, or on TPUs a select of the two results.

    A TPU's compiler fuses the selects, and the addition of the updates that follows, into the step itself. The results
    of a branch it would write, and read again for the addition. XLA:CPU would compute the step once for each result.
    """
    apply_step = jax.jit(apply_step)  # traced once for both

    def select(finite: jax.Array, operands: Any) -> Any:
        return jax.tree.map(lambda new, old: lax.select(finite, new, old), apply_step(operands), skip_step(operands))

    return lax.platform_dependent(
        finite,
        operands,
        tpu=select,
        default=lambda finite, operands: lax.cond(finite, apply_step, skip_step, operands),
    )


def _unpacked_by_platform(
    deliveries: list[Delivery], condition: jax.Array, apply_step: Any, skip_step: Any, operands: Any
) -> Any:
    """`lax.cond`, after which packed pairs are taken apart; on TPUs in the branches.

    A TPU's compiler takes them apart in the kernel that makes them. XLA:CPU would compute each half in a pass of its
    own over the moments.
    """
    if not any(delivery.is_packed for delivery in deliveries):
        return lax.cond(condition, apply_step, skip_step, operands)
    apply_step = jax.jit(apply_step, inline=True)  # traced once for both

    def unpacked(results: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        held, inner = results
        return [delivery.unpacked(h) for delivery, h in zip(deliveries, held, strict=True)], inner

    def inside(condition: jax.Array, operands: Any) -> Any:
        def apply_unpacked(operands: Any) -> Any:
            held, inner = apply_step(operands)
            return unpacked(([lax.optimization_barrier(h) for h in held], inner))

        def skip_unpacked(operands: Any) -> Any:
            params, _, inner, masters = operands
            leaves, tree = jax.tree.flatten(params)
            held = skip_step(operands)[0]
            same = zip(deliveries, leaves, tree.flatten_up_to(masters), held, strict=True)
            return [(param, kept) if delivery.is_packed else h for delivery, param, kept, h in same], inner

        return lax.cond(condition, apply_unpacked, skip_unpacked, operands)

    def outside(condition: jax.Array, operands: Any) -> Any:
        return unpacked(lax.cond(condition, apply_step, skip_step, operands))

    return lax.platform_dependent(condition, operands, tpu=inside, default=outside)


def _true_gradients(gradients: Any, scale: ArrayLike | None, params: Any) -> Any:
    """Unscaled, in float32, or in the dtype of a param that is wider."""
    params = differentiated(params)
    true = gradients if scale is None else unscale_by_reciprocal(gradients, scale)
    return jax.tree.map(lambda g, p: g.astype(working_dtype(p.dtype)), true, params)


def _with_overwritten(result: Any, params: Any, gradients: Any, overwrite: Callable[[Any, Any], Any]) -> Any:
    """`result` with its empty nodes filled: an overwritten leaf's gradient is its new value, scaled by nothing."""
    gradients = gradients.tree if isinstance(gradients, ScaledGradients) else gradients
    if differentiated(params) is not params:
        gradients = type(params)(gradients, gradients)
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


def _strengthened(leaf: Any) -> Any:
    """A state leaf with a dtype of its own: a Python number that was set from outside, as `tree_set` does, has none."""
    if isinstance(leaf, (float, int)):
        return jnp.asarray(leaf, jnp.float32 if isinstance(leaf, float) else jnp.result_type(type(leaf)))
    return lax.convert_element_type(leaf, leaf.dtype) if jax.typeof(leaf).weak_type else leaf


def _keep_type(new: Any, old: Any) -> Any:
    return new if jnp.issubdtype(old.dtype, jax.dtypes.extended) else lax.convert_element_type(new, old.dtype)
