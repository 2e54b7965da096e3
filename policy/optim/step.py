"""`Stepper`: the options of a `mixed_precision`, and the functions that init and step with them.

A step is::

    true = clip(unscale(gradients))          # float32
    finite = is_finite(true)                 # one flag, with the norm that clips
    if finite:
      weights = join(params, masters)        # float32
      updates, inner = tx.update(true, inner, weights)
      params, masters = split(weights + updates)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.core.arrays import varying_axes
from policy.core.policy import Policy
from policy.grads.finiteness import fusion_barrier
from policy.grads.loss_scale import (
    LossScale,
    NoOpLossScale,
    ScaledGradients,
    StaticLossScale,
    require_positive,
    warn_if_forgotten,
)
from policy.optim import checks, gradients, moments, storage_modes
from policy.optim.branches import Branch, Operands, Results, cond_or_select, in_one_pass, selected
from policy.optim.host_memory import MemoryKind, on_device, on_host, require_memory
from policy.optim.state import (
    MixedPrecisionState,
    has_overwritten,
    incremented,
    layout_of,
    like_before,
    owned,
    strong_copy,
    strongly_typed,
    with_overwritten,
    without_overwritten,
)
from policy.optim.storage_modes import MasterWeights, ParamUpdate, StorageMode

P = ParamSpec("P")
R = TypeVar("R")
Stepped: TypeAlias = tuple[optax.Params, MixedPrecisionState]
"""New params, or the updates of the old ones, and the new state."""


class Given(NamedTuple):
    """The arguments of a step, without overwritten leaves.

    Attributes:
      gradients: a tree like the params, as it was handed over.
      scale: the scale that the gradients carry, () float32, or None.
      state: the state before.
      params: the params before.
      extra_args: further arguments of the inner transform's update.
    """

    gradients: optax.Updates
    scale: ArrayLike | None
    state: MixedPrecisionState
    params: optax.Params
    extra_args: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Stepper:
    """The options of a `MixedPrecision`, checked, and its functions.

    Attributes: those of `MixedPrecision`, of the same names.
    """

    inner: optax.GradientTransformationExtraArgs
    policy: Policy
    loss_scale: LossScale
    master_weights: MasterWeights
    moment_dtypes: dict[str, np.dtype] | None
    clip_global_norm: float | None
    key: jax.Array | None
    axis_name: tuple[Hashable, ...]
    skip_nonfinite: bool
    state_memory_kind: MemoryKind | None = None
    _made: dict[Hashable, MixedPrecisionState | None] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @functools.cached_property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The inner transform, checked, with its moments as they are stored."""
        checked = gradients.checked(self.inner)
        if self.moment_dtypes is None:
            return checked
        return moments.store_moments(checked, self.moment_dtypes, self.key, self.axis_name)

    def init(self, params: optax.Params) -> MixedPrecisionState:
        """Returns a state for `params`. Raises ValueError where a param can't be stepped."""
        checks.require_outermost()
        checks.check_initial_params(params)
        require_memory(self.state_memory_kind, params)
        params = without_overwritten(params)
        checks.warn_of_wide_params(params, self.policy)
        return self.make_state(params, self._first_masters(params))

    def _first_masters(self, params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: self._mode(p).init(p), params)

    def _mode(self, param: jax.Array) -> StorageMode:
        return storage_modes.storage_mode(param.dtype, self.master_weights)

    def make_state(self, params: optax.Params, masters: optax.Params) -> MixedPrecisionState:
        """Returns a state for params without their overwritten leaves, and their stored arrays.

        Raises:
          ValueError: a moment can't be stored as `moment_dtype` says.
        """
        state = self._state(params, masters)
        self._made[checks.types_of(params)] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state
        )
        if self.moment_dtypes is not None:
            how = self.moment_dtypes, self.key is not None
            _run_optax(moments.check_moments, self.inner, state.inner, params, *how)
        return on_host(state) if self.state_memory_kind else state

    def _state(self, params: optax.Params, masters: optax.Params) -> MixedPrecisionState:
        wide = jax.tree.map(lambda p, kept: self._mode(p).join(p, kept), params, masters)
        inner = _run_optax(self.transform.init, wide)
        layout = layout_of(params, self.master_weights)
        seen = {id(leaf) for leaf in jax.tree.leaves((params, wide, masters))}
        return MixedPrecisionState(
            inner=jax.tree.map(lambda leaf: owned(leaf, seen), inner),
            loss_scale=jax.tree.map(strong_copy, self.loss_scale),
            finite=jnp.array(True),
            skipped=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            masters=masters,
            mode=jnp.array(layout.storage, jnp.int32),
            layout=layout,
        )

    def check_state(
        self, params: optax.Params, state: MixedPrecisionState
    ) -> jax.Array | Literal[True]:
        """Rejects a state that is not of this transform and of these params.

        Args:
          params: the params, without overwritten leaves.
          state: the state to check.

        Returns:
          True, or a () bool that says at run time if traced masters are of the mode that their tree
          says.

        Raises:
          ValueError: the params' tree or dtypes, the storage mode, the inner state's tree, a
            moment's dtype, or the kind of loss scale differ.
        """
        made = self._made_for(params)
        if made is not None and checks.types_of(state) == checks.types_of(made):
            return checks.has_stored_mode(state, state.layout.dtypes or ())
        is_stored = checks.require_storage(params, state, self.master_weights)
        if type(state.loss_scale) is not type(self.loss_scale):
            raise ValueError(
                f"state has a {type(state.loss_scale).__name__}, but tx was made with a "
                f"{type(self.loss_scale).__name__}: make tx with the loss_scale of the state, or "
                f"{checks.CONVERT}."
            )
        if made is not None:
            checks.check_inner(state.inner, made.inner, params, self.moment_dtypes)
        return is_stored

    def _made_for(self, params: optax.Params) -> MixedPrecisionState | None:
        """Returns the shapes of the state for params of these shapes.

        None where `init` can't be traced: it reads values, or more than shapes.
        """
        key = checks.types_of(params)
        if key not in self._made:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
            try:
                self._made[key] = jax.eval_shape(
                    lambda params: self._state(params, self._first_masters(params)), shapes
                )
            except Exception:
                self._made[key] = None
        return self._made[key]

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        """Returns float32 updates and the state, as optax's contract has it.

        `optax.apply_updates` makes the rounded masters of them.
        """
        return self.step(updates, state, params, extra_args, as_updates=True)

    def step(
        self,
        given: Any,
        state: Any,
        params: Any,
        extra_args: dict[str, Any],
        *,
        as_updates: bool,
    ) -> Stepped:
        """Checks the arguments, and takes one step.

        Args:
          given: the gradients.
          state: the state before.
          params: the params before.
          extra_args: further arguments of the inner transform's update.
          as_updates: True returns updates of the params, to be added to them.

        Returns:
          The new params, or with `as_updates` the float32 updates of the old ones; and the state.
        """
        scale: ArrayLike | None = None
        if isinstance(given, ScaledGradients):
            given, scale = given.tree, given.scale
        gradients.check_gradients(given, state, params)
        self._warn_if_forgotten(given, scale, state)
        whole = (params, given) if has_overwritten(params) else None
        if whole is not None:
            params, given = without_overwritten(params), without_overwritten(given)
        belongs = self.check_state(params, state)
        for each in (scale, state.loss_scale.loss_scale):
            is_positive = True if each is None else require_positive(each)
            if self.skip_nonfinite and is_positive is not True:
                belongs = is_positive if belongs is True else belongs & is_positive
        state = state._replace(inner=strongly_typed(state.inner))
        arguments = Given(given, scale, state, params, extra_args)
        if _is_eager(arguments):
            # lax.cond would compile its branches anew in each eager call
            result, state = self._compiled_step(arguments, as_updates=as_updates)
        else:
            result, state = self._step(arguments, belongs=belongs, as_updates=as_updates)
        if whole is not None:
            result = with_overwritten(result, *whole, state.finite, as_updates)
        return result, state

    def _warn_if_forgotten(
        self, given: Any, scale: ArrayLike | None, state: MixedPrecisionState
    ) -> None:
        ours = self.loss_scale
        is_one = isinstance(ours, StaticLossScale) and ours.loss_scale == 1
        if not (is_one or isinstance(ours, NoOpLossScale)):
            warn_if_forgotten(given, state.loss_scale.loss_scale, carry_scale=scale is not None)

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., Stepped]:
        return jax.jit(functools.partial(self._step, belongs=True), static_argnames="as_updates")

    def _step(
        self, given: Given, *, belongs: jax.Array | Literal[True], as_updates: bool
    ) -> Stepped:
        """Steps params and state that were checked.

        Args:
          given: the arguments.
          belongs: True, or a () bool: the step is left out where it is False.
          as_updates: True returns updates of the params, to be added to them.
        """
        if self.state_memory_kind:
            given = given._replace(state=on_device(given.state, self.state_memory_kind))
        state, params = given.state, given.params
        leaves, tree = jax.tree.flatten(params)
        weights = [ParamUpdate.of(p.dtype, self.master_weights, as_updates) for p in leaves]
        norm = None if self.clip_global_norm is None else self._norm(given)
        flag = self._flag(given, norm, belongs, weights)
        branches = self._branches(given, weights, norm)
        operands = Operands(params, given.gradients, state.inner, state.masters)
        encoded, inner = _chosen(flag, branches, operands, weights, self.skip_nonfinite)
        # a packed pair is taken apart here: in a branch XLA:CPU would compute each half in a pass
        new = [w.result(e, p) for w, e, p in zip(weights, encoded, leaves, strict=True)]
        if not as_updates:
            inner = in_one_pass(inner, encoded, [w.mode for w in weights], params)
        finite = jnp.array(True) if flag is None else flag
        after = state._replace(
            inner=inner,
            loss_scale=state.loss_scale.adjust(finite),
            finite=finite,
            skipped=incremented(state.skipped, ~finite),
            count=incremented(state.count, finite),
            masters=tree.unflatten([stored for _, stored in new]),
        )
        after = on_host(after) if self.state_memory_kind else after
        return tree.unflatten([result for result, _ in new]), after

    def _norm(self, given: Given) -> jax.Array:
        """Returns the global norm of unscaled gradients, () float32."""
        if gradients.examples_axis(given.gradients, given.params):
            raise ValueError(
                "clip_global_norm clips one gradient, but these gradients are per example, and the "
                "transform that takes them clips each example's: leave clip_global_norm out."
            )
        true = gradients.true_gradients(given.gradients, given.scale, given.params)
        return gradients.gradient_norm(true, self.axis_name)

    def _flag(
        self,
        given: Given,
        norm: jax.Array | None,
        belongs: jax.Array | Literal[True],
        weights: list[ParamUpdate],
    ) -> jax.Array | None:
        """Returns a () bool: True if the step is applied; None for a step that always is."""
        if belongs is not True and varying_axes(belongs):
            belongs = gradients.agreed(belongs, given.gradients, self.axis_name)
        if not self.skip_nonfinite:
            if belongs is not True:
                return belongs
            # always True, which XLA can't know; known before the step, so that a select costs no
            # pass of its own
            return given.state.count >= 0 if any(w.mode.is_packed for w in weights) else None
        # one pass over the gradients serves both: a norm is finite where all squares are
        if norm is None:
            finite = gradients.gradients_finite(*given[:2], given.params, self.axis_name)
        else:
            finite = fusion_barrier(jnp.isfinite(norm))
        return finite if belongs is True else finite & belongs

    def _branches(
        self, given: Given, weights: list[ParamUpdate], norm: jax.Array | None
    ) -> tuple[Branch, Branch]:
        """Returns the step, and the one that changes nothing, with results of the same types.

        Gradients are cast and unscaled again inside: that fuses into the operations that read them,
        and a skipped step pays for the flag only.
        """
        count, extra = given.state.count, dict(given.extra_args)
        if self.moment_dtypes is not None:
            extra["rounding_count"] = count

        def apply_step(of: Operands) -> Results:
            true = gradients.true_gradients(of.gradients, given.scale, of.params)
            if norm is not None and self.clip_global_norm is not None:
                true = gradients.clip_to_norm(true, norm, self.clip_global_norm)
            leaves, tree = jax.tree.flatten(of.params)
            pairs = zip(weights, leaves, tree.flatten_up_to(of.masters), strict=True)
            wide = [w.mode.join(p, stored) for w, p, stored in pairs]
            updates, inner = _run_optax(
                self.transform.update, true, of.inner, tree.unflatten(wide), **extra
            )
            updates = [jnp.asarray(u) for u in jax.tree.leaves(updates)]
            updates = [u.astype(w.dtype) for w, u in zip(wide, updates, strict=True)]
            new = list(map(jnp.add, wide, updates))
            keys = storage_modes.rounding_keys(self.key, new, count, self.axis_name)
            each = zip(weights, leaves, new, updates, keys, strict=True)
            return [w.applied(*of_param) for w, *of_param in each], like_before(inner, of.inner)

        def skip_step(of: Operands) -> Results:
            leaves, tree = jax.tree.flatten(of.params)
            pairs = zip(weights, leaves, tree.flatten_up_to(of.masters), strict=True)
            return [w.skipped(p, stored) for w, p, stored in pairs], of.inner

        return apply_step, skip_step


def _chosen(
    flag: jax.Array | None,
    branches: tuple[Branch, Branch],
    operands: Operands,
    weights: list[ParamUpdate],
    skips: bool,
) -> Results:
    """Returns the results of the branch that a flag chooses, () bool; None chooses the first."""
    if flag is None:
        return branches[0](operands)
    if not (skips or any(w.mode.stores for w in weights)):
        return selected(flag, *[branch(operands) for branch in branches])
    tpu_selects = all(w.as_update or w.mode.is_packed or w.is_wide for w in weights)
    return cond_or_select(flag, *branches, operands, tpu_selects=tpu_selects)


def _is_eager(given: Given) -> bool:
    """Returns whether a step is of concrete arrays.

    A transform may branch on numbers among `extra_args`, so these are not compiled.
    """
    arrays, extra = jax.tree.leaves(given[:-1]), jax.tree.leaves(given.extra_args)
    if [True for x in (*arrays, *extra) if isinstance(x, Tracer)]:
        return False
    are_arrays = all(isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in arrays)
    return are_arrays and all(isinstance(x, jax.Array) or np.ndim(x) for x in extra)


def _run_optax(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    # Optax relies on JAX's own promotion (adam: a Python float to the power of an int32 count),
    # also where a program asks for strict.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*args, **kwargs)
