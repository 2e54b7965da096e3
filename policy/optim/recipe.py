"""The parts of a `mixed_precision`, and the step that they make.

The order is always: cast to float32, unscale, one finiteness flag for all gradients, clip, the inner transform, master
weights, round to the param's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.grads.loss_scale import (
    LossScale,
    all_finite,
    all_squares_finite,
    fusion_barrier,
    require_positive,
    unscale_by_reciprocal,
)
from policy.grads.scaled_losses import warn_if_scaled
from policy.grads.value_and_grad import ScaledGradients
from policy.mapped_axes import varying_axes
from policy.optim.branches import Branches, selected
from policy.optim.checks import (
    check_gradients,
    check_initial_params,
    check_stepped,
    differentiated,
    per_example,
    warn_of_wide_params,
)
from policy.optim.clip import clip_to_norm, global_norm, mapped_axes
from policy.optim.delivery import Delivery
from policy.optim.masters import layout_of, make_masters, widen, without_overwritten
from policy.optim.moments import check_moments, moment_targets, narrow_moments, widen_moments
from policy.optim.naming import optimizer_name
from policy.optim.outermost import require_outermost
from policy.optim.state import MixedPrecisionState, states_in, strengthened, strong
from policy.optim.state_checks import InnerLike, check_inner, check_loss_scale, inner_like, require_storage
from policy.optim.storage import PACKED, MasterWeights, kind_of
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
    check_results: bool
    _inner_likes: dict[Any, InnerLike | None] = dataclasses.field(default_factory=dict, repr=False)

    def init(self, params: optax.Params) -> MixedPrecisionState:
        """A state for `params`. Raises ValueError where a param can't be stepped."""
        require_outermost(Recipe.make_state)
        check_initial_params(params)
        params = without_overwritten(params)
        warn_of_wide_params(params, self.policy)
        return self.make_state(params, make_masters(params, self.master_weights))

    def make_state(self, params: Any, masters: Any) -> MixedPrecisionState:
        """A state for params without their overwritten leaves, and their masters."""
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
        self._inner_likes[_shapes_of(wide)] = InnerLike.of(inner, wide, self.moment_dtypes)
        layout = layout_of(params, self.master_weights, optimizer_name(self.inner, inner))
        seen = {id(leaf) for leaf in jax.tree.leaves((params, wide, masters))}
        return MixedPrecisionState(
            inner=jax.tree.map(lambda leaf: _settled(leaf, seen), inner),
            loss_scale=jax.tree.map(strong, self.loss_scale),
            finite=jnp.array(True),
            skipped=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            masters=masters,
            mode=jnp.array(layout.storage, jnp.int32),
            layout=layout,
        )

    def check_state(self, params: Any, state: MixedPrecisionState) -> jax.Array | Literal[True]:
        """Refuses a state that is not of this transform and of these params, which are without overwritten leaves.

        Returns:
          True, or a () bool that says at run time whether traced masters are of the mode that their tree says.

        Raises:
          ValueError: the params' tree or dtypes, the storage mode, the inner transform, a moment's dtype, or the kind
            of loss scale differ.
        """
        is_stored = require_storage(params, state, self.master_weights)
        check_loss_scale(state.loss_scale, self.loss_scale)
        wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, working_dtype(p.dtype)), params)
        key = _shapes_of(wide)
        if key not in self._inner_likes:
            self._inner_likes[key] = _run_optax(inner_like, self.inner.init, wide, self.moment_dtypes)
        check_inner(state.inner, self._inner_likes[key], state.layout, self.inner, self.moment_dtypes)
        return is_stored

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
        warn_if_scaled(state.loss_scale.loss_scale)
        params, gradients = without_overwritten(params), without_overwritten(gradients)
        belongs = self.check_state(params, state)
        scales = [require_positive(each) for each in (scale, state.loss_scale.loss_scale) if each is not None]
        if self.skip_nonfinite:
            belongs = _all_of(belongs, *scales)
        state = state._replace(inner=jax.tree.map(strengthened, state.inner))
        if (
            self._branches(params)
            and not isinstance(scale, Tracer)
            and _is_eager((gradients, state, params), extra_args)
        ):
            # lax.cond would compile its branches anew in each eager call
            scale = None if scale is None else jnp.asarray(scale, jnp.float32)
            return self._compiled_step(gradients, scale, state, params, extra_args, as_updates=as_updates)
        return self._step(gradients, scale, state, params, extra_args, belongs=belongs, as_updates=as_updates)

    def _branches(self, params: Any) -> bool:
        kinds = {kind_of(leaf.dtype, self.master_weights) for leaf in jax.tree.leaves(params)}
        return self.skip_nonfinite or bool(kinds & set(PACKED))

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., Any]:
        return jax.jit(functools.partial(self._step, belongs=True), static_argnames="as_updates")

    def _step(
        self,
        gradients: Any,
        scale: ArrayLike | None,
        state: Any,
        params: Any,
        extra_args: dict[str, Any],
        *,
        belongs: jax.Array | Literal[True],
        as_updates: bool,
    ) -> tuple[Any, MixedPrecisionState]:
        """Steps params and state that were checked.

        Args:
          belongs: True, or a () bool: the step is left out where it is False.
        """
        norm = self._norm(gradients, scale, params)
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

        operands = (params, gradients, state.inner, state.masters)
        branches = Branches(deliveries, as_updates, apply_step, skip_step, operands)
        if belongs is not True and varying_axes(belongs):
            belongs = self.agreed(belongs, gradients)
        if self.skip_nonfinite:
            # one look at the gradients serves both: a norm is finite where the squares of all of them are
            look = functools.partial(self.agreed_finite, gradients, scale, params)
            finite = look() if norm is None else fusion_barrier(jnp.isfinite(norm))
            finite = finite if belongs is True else finite & belongs
            held, inner = branches.applied_where(finite)
        elif belongs is not True or branches.is_packed:
            finite = state.count >= 0 if belongs is True else belongs  # always true, which XLA can't know
            held, inner = branches.applied_mostly(finite)
        else:
            finite = jnp.array(True)
            held, inner = branches.applied()
        new = [d.result(h, p) for d, h, p in zip(deliveries, held, leaves, strict=True)]
        if self.check_results:
            sound, new, inner = self._sound(branches, state, (new, inner))
            finite = finite & sound
        return jax.tree.unflatten(tree, [result for result, _ in new]), state._replace(
            inner=inner,
            loss_scale=state.loss_scale.adjust(finite),
            finite=finite,
            skipped=_incremented(state.skipped, ~finite),
            count=_incremented(state.count, finite),
            masters=jax.tree.unflatten(tree, [kept for _, kept in new]),
        )

    def _norm(self, gradients: Any, scale: ArrayLike | None, params: Any) -> jax.Array | None:
        """The global norm of the true gradients, () float32; None where nothing is clipped."""
        if self.clip_global_norm is None:
            return None
        if per_example(gradients, params):
            raise ValueError(
                "clip_global_norm clips one gradient, but gradients are per example, and what takes them clips each: "
                "leave it out."
            )
        return global_norm(_true_gradients(gradients, scale, params), self.axis_name)

    def _sound(
        self, branches: Branches, state: MixedPrecisionState, results: tuple[list[Any], Any]
    ) -> tuple[jax.Array, list[Any], Any]:
        """Returns whether finite leaves stay finite, () bool, and the results of the step, or of none where they don't.

        Args:
          results: each param's result with what is kept beside it, and the inner state.
        """
        params, gradients, _, masters = branches.operands
        leaves, tree = jax.tree.flatten(params)
        held, same_inner = branches.skip_step(branches.operands)
        skipped = zip(branches.deliveries, held, leaves, strict=True)
        same = [d.result(d.unpacked(h), p) for d, h, p in skipped], same_inner
        each = zip(branches.deliveries, leaves, results[0], strict=True)
        moved = [(p + r if branches.as_updates and d.is_wide else r, kept) for d, p, (r, kept) in each]
        before = [*zip(leaves, tree.flatten_up_to(masters), strict=True)], state.inner
        sound = self.agreed(_stays_finite(before, (moved, results[1])), gradients)
        return sound, *selected(sound, results, same)

    def agreed_finite(self, gradients: Any, scale: ArrayLike | None, params: Any) -> jax.Array:
        """() bool, the same on every device: whether the squares of all true gradients are finite.

        Of gradients with more range than their params, the squares that are stepped with.
        """
        like = jax.tree.leaves(differentiated(params))
        if any(_has_more_range(g, p) for g, p in zip(jax.tree.leaves(gradients), like, strict=True)):
            gradients, scale = _true_gradients(gradients, scale, params), None
        return self.agreed(all_squares_finite(gradients, scale), gradients)

    def agreed(self, flag: jax.Array, gradients: Any) -> jax.Array:
        """Returns a () bool that is true where every device of the mapped axes of gradients has a true flag."""
        axes = frozenset().union(*mapped_axes(gradients, self.axis_name))
        return lax.pmin(flag.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0 if axes else flag

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


def _all_of(*flags: jax.Array | bool) -> jax.Array | Literal[True]:
    """True, or the conjunction of the flags that are traced."""
    traced = [flag for flag in flags if isinstance(flag, jax.Array)]
    return functools.reduce(operator.and_, traced) if traced else True


def _has_more_range(gradient: Any, param: Any) -> bool:
    return jnp.finfo(gradient.dtype).maxexp > jnp.finfo(working_dtype(param.dtype)).maxexp


def _is_eager(trees: Any, extra_args: Any) -> bool:
    """Returns whether a step is of arrays of values; numbers among `extra_args` may be what a transform branches on."""
    arrays, extra = jax.tree.leaves(trees), jax.tree.leaves(extra_args)
    are_arrays = all(isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in arrays)
    are_arrays = are_arrays and all(isinstance(x, jax.Array) or np.ndim(x) for x in extra)
    return are_arrays and not any(isinstance(x, Tracer) for x in (*arrays, *extra))


def _stays_finite(before: Any, after: Any) -> jax.Array:
    """() bool: whether every floating leaf that was finite still is. Some of Optax's states hold infinity at first."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    flags = [all_finite(new) | ~all_finite(old) for old, new in pairs]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def _incremented(count: jax.Array, by: jax.Array) -> jax.Array:
    """A counter that stays at the largest integer, as Optax's do: one that wrapped would count from below."""
    room = count < np.iinfo(np.int32).max
    return count + (room & by).astype(jnp.int32)


def _shapes_of(tree: Any) -> Any:
    """Returns a key for trees of the same structure, shapes and dtypes."""
    return jax.tree.structure(tree), tuple((x.shape, np.dtype(x.dtype).name) for x in jax.tree.leaves(tree))


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


def _keep_type(new: Any, old: Any) -> Any:
    return new if jnp.issubdtype(old.dtype, jax.dtypes.extended) else lax.convert_element_type(new, old.dtype)
