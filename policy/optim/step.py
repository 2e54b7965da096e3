"""`Stepper`: the options of a `mixed_precision`, and the functions that init and step with them.

The order of a step is always: cast to float32, unscale, one finiteness flag for all gradients,
clip, the inner transform, master weights, round to the param's dtype. A step is applied or skipped
on the flag, as each platform compiles it best.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike

from policy.core.arrays import varying_axes, working_dtype
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
from policy.optim import checks, moments
from policy.optim.gradients import (
    agreed,
    check_gradients,
    check_stepped,
    clip_to_norm,
    examples_axis,
    gradient_norm,
    gradients_finite,
    true_gradients,
)
from policy.optim.host_memory import MemoryKind, on_device, on_host, require_memory
from policy.optim.moments import StoredInner
from policy.optim.state import (
    MixedPrecisionState,
    as_type_of,
    incremented,
    layout_of,
    owned,
    strong_copy,
    strongly_typed,
    with_overwritten,
    without_overwritten,
)
from policy.optim.storage_modes import (
    Encoded,
    MasterWeights,
    ParamUpdate,
    StorageMode,
    Stored,
    inner_params,
    rounding_keys,
    storage_mode,
    written_with,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
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
    _made: dict[Hashable, optax.OptState | None] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def init(self, params: optax.Params) -> MixedPrecisionState:
        """Returns a state for `params`. Raises ValueError where a param can't be stepped."""
        checks.require_outermost()
        checks.check_initial_params(params)
        require_memory(self.state_memory_kind, params)
        params = without_overwritten(params)
        checks.warn_of_wide_params(params, self.policy)
        masters = jax.tree.map(lambda p: storage_mode(p.dtype, self.master_weights).init(p), params)
        return self.make_state(params, masters)

    def make_state(self, params: optax.Params, masters: optax.Params) -> MixedPrecisionState:
        """Returns a state for params without their overwritten leaves, and their stored arrays."""
        wide = inner_params(params, masters, self.master_weights)
        inner = _run_optax(self.inner.init, wide)
        stored = StoredInner(inner, optax.MaskedNode())
        if self.moment_dtypes is not None:
            dtypes, by_chance = self.moment_dtypes, self.key is not None
            _run_optax(moments.check_moments, self.inner, inner, params, dtypes, by_chance)
            targets = moments.stored_forms(inner, params, dtypes)
            stored = moments.narrow_moments(inner, targets, dtypes)
        layout = layout_of(params, self.master_weights)
        seen = {id(leaf) for leaf in jax.tree.leaves((params, wide, masters))}
        stored = jax.tree.map(lambda leaf: owned(leaf, seen), stored)
        state = MixedPrecisionState(
            inner=stored.state,
            loss_scale=jax.tree.map(strong_copy, self.loss_scale),
            finite=jnp.array(True),
            skipped=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            masters=masters,
            mode=jnp.array(layout.storage, jnp.int32),
            moment_scales=stored.scales,
            layout=layout,
        )
        return on_host(state) if self.state_memory_kind else state

    def check_state(
        self, params: optax.Params, state: MixedPrecisionState
    ) -> jax.Array | Literal[True]:
        """Refuses a state that is not of this transform and of these params.

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
        is_stored = checks.require_storage(params, state, self.master_weights)
        if type(state.loss_scale) is not type(self.loss_scale):
            raise ValueError(
                f"state has a {type(state.loss_scale).__name__}, but tx was made with a "
                f"{type(self.loss_scale).__name__}: make tx with the loss_scale of the state, or "
                f"{checks.CONVERT}."
            )
        wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, working_dtype(p.dtype)), params)
        made = self._made_for(wide)
        if made is not None:
            stored = StoredInner(state.inner, state.moment_scales)
            checks.check_inner(stored, made, wide, self.moment_dtypes)
        return is_stored

    def _made_for(self, wide: optax.Params) -> optax.OptState | None:
        """Returns the shapes of the inner state for params of these shapes.

        None where `init` can't be traced: it reads values, or more than shapes.
        """
        leaves = jax.tree.leaves(wide)
        key = jax.tree.structure(wide), tuple((x.shape, np.dtype(x.dtype).name) for x in leaves)
        if key not in self._made:
            try:
                self._made[key] = _run_optax(jax.eval_shape, self.inner.init, wide)
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
        gradients: Any,
        state: Any,
        params: Any,
        extra_args: dict[str, Any],
        *,
        as_updates: bool,
    ) -> Stepped:
        """Checks the arguments, and takes one step.

        Returns:
          The new params, or with `as_updates` the float32 updates of the old ones; and the state.
        """
        scale: ArrayLike | None = None
        if isinstance(gradients, ScaledGradients):
            gradients, scale = gradients.tree, gradients.scale
        check_gradients(gradients, state, params)
        ours = self.loss_scale
        is_one = isinstance(ours, StaticLossScale) and ours.loss_scale == 1
        if not (is_one or isinstance(ours, NoOpLossScale)):
            current = state.loss_scale.loss_scale
            warn_if_forgotten(gradients, current, carry_scale=scale is not None)
        whole = params, gradients
        params, gradients = without_overwritten(params), without_overwritten(gradients)
        belongs = self.check_state(params, state)
        for each in (scale, state.loss_scale.loss_scale):
            is_positive = True if each is None else require_positive(each)
            if self.skip_nonfinite and is_positive is not True:
                belongs = is_positive if belongs is True else belongs & is_positive
        state = state._replace(inner=jax.tree.map(strongly_typed, state.inner))
        given = Given(gradients, scale, state, params, extra_args)
        if _is_eager(given):
            # lax.cond would compile its branches anew in each eager call
            result, state = self._compiled_step(given, as_updates=as_updates)
        else:
            result, state = self._step(given, belongs=belongs, as_updates=as_updates)
        return with_overwritten(result, *whole, state.finite, as_updates), state

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., Stepped]:
        return jax.jit(functools.partial(self._step, belongs=True), static_argnames="as_updates")

    def _step(
        self, given: Given, *, belongs: jax.Array | Literal[True], as_updates: bool
    ) -> Stepped:
        """Steps params and state that were checked, in the device's memory.

        Args:
          given: the arguments.
          belongs: True, or a () bool: the step is left out where it is False.
          as_updates: True returns updates of the params, to be added to them.
        """
        given = given._replace(state=on_device(given.state, self.state_memory_kind))
        gradients, scale, state, params, _ = given
        norm = self._norm(given)
        leaves, tree = jax.tree.flatten(params)
        modes = [storage_mode(p.dtype, self.master_weights) for p in leaves]
        each = zip(leaves, modes, strict=True)
        updates = [ParamUpdate(mode, np.dtype(p.dtype), as_updates) for p, mode in each]
        inner = StoredInner(state.inner, state.moment_scales)
        operands = Operands(params, gradients, inner, state.masters)
        branches = self._branches(given, updates, norm)
        tpu_selects = as_updates or all(d.mode.is_packed or d.is_wide for d in updates)
        if belongs is not True and varying_axes(belongs):
            belongs = agreed(belongs, gradients, self.axis_name)
        if self.skip_nonfinite:
            # one pass over the gradients serves both: a norm is finite where all squares are
            if norm is None:
                finite = gradients_finite(gradients, scale, params, self.axis_name)
            else:
                finite = fusion_barrier(jnp.isfinite(norm))
            finite = finite if belongs is True else finite & belongs
            results = cond_or_select(finite, *branches, operands, tpu_selects=tpu_selects)
        elif belongs is not True or any(mode.is_packed for mode in modes):
            # always True where the state belongs, which XLA can't know; known before the step, so
            # that a select costs no pass of its own
            finite = state.count >= 0 if belongs is True else belongs
            if any(mode.stores for mode in modes):
                results = cond_or_select(finite, *branches, operands, tpu_selects=tpu_selects)
            else:
                results = selected(finite, *(branch(operands) for branch in branches))
        else:
            finite = jnp.array(True)
            results = branches[0](operands)
        encoded, inner = results
        # a packed pair is taken apart here: in a branch XLA:CPU would compute each half in a pass
        new = [d.result(e, p) for d, e, p in zip(updates, encoded, leaves, strict=True)]
        if not as_updates:
            inner = _in_one_pass(inner, encoded, modes, params)
        after = state._replace(
            inner=inner.state,
            moment_scales=inner.scales,
            loss_scale=state.loss_scale.adjust(finite),
            finite=finite,
            skipped=incremented(state.skipped, ~finite),
            count=incremented(state.count, finite),
            masters=tree.unflatten(stored for _, stored in new),
        )
        after = on_host(after) if self.state_memory_kind else after
        return tree.unflatten(result for result, _ in new), after

    def _branches(
        self, given: Given, param_updates: list[ParamUpdate], norm: jax.Array | None
    ) -> tuple[Branch, Branch]:
        """Returns the step, and the one that changes nothing, with results of the same types.

        Gradients are cast and unscaled again inside: that fuses into the operations that read them,
        and a skipped step pays for the flag only.
        """

        def apply_step(operands: Operands) -> Results:
            params, gradients, inner, masters = operands
            wide = inner_params(params, masters, self.master_weights)
            true = true_gradients(gradients, given.scale, params)
            if norm is not None and self.clip_global_norm is not None:
                true = clip_to_norm(true, norm, self.clip_global_norm)
            updates, inner = self._inner_step(true, inner, wide, given)
            new = jax.tree.leaves(jax.tree.map(jnp.add, wide, updates))
            keys = rounding_keys(self.key, new, given.state.count, self.axis_name)
            each = param_updates, jax.tree.leaves(params), new, jax.tree.leaves(updates), keys
            applied = [d.applied(p, w, u, key) for d, p, w, u, key in zip(*each, strict=True)]
            return applied, inner

        def skip_step(operands: Operands) -> Results:
            each = zip(param_updates, *operands.leaves(), strict=True)
            return [d.skipped(p, kept) for d, p, kept in each], operands.inner

        return apply_step, skip_step

    def _norm(self, given: Given) -> jax.Array | None:
        """Returns the global norm of unscaled gradients, () float32; None without clipping."""
        if self.clip_global_norm is None:
            return None
        gradients, scale, _, params, _ = given
        if examples_axis(gradients, params):
            raise ValueError(
                "clip_global_norm clips one gradient, but these gradients are per example, and the "
                "transform that takes them clips each example's: leave clip_global_norm out."
            )
        return gradient_norm(true_gradients(gradients, scale, params), self.axis_name)

    def _inner_step(
        self, gradients: optax.Updates, stored: StoredInner, wide: optax.Params, given: Given
    ) -> tuple[optax.Updates, StoredInner]:
        """Runs the inner transform: float32 updates, and its state in the types that it had."""
        dtypes, inner = self.moment_dtypes or {}, stored.state
        targets = moments.stored_forms(inner, wide, dtypes)
        computed = moments.widen_moments(stored, targets)
        extra = given.extra_args
        updates, new_inner = _run_optax(self.inner.update, gradients, computed, wide, **extra)
        check_stepped(gradients, updates, wide, new_inner, inner)
        updates = jax.tree.map(lambda w, u: jnp.asarray(u).astype(w.dtype), wide, updates)
        leaves, first = jax.tree.leaves(new_inner), len(jax.tree.leaves(wide))
        key = self.key if dtypes else None
        keys = rounding_keys(key, leaves, given.state.count, self.axis_name, first=first)
        new = moments.narrow_moments(new_inner, targets, dtypes, keys, stored)
        return updates, jax.tree.map(as_type_of, new, stored)


def _in_one_pass(
    inner: StoredInner, encoded: list[Encoded], modes: list[StorageMode], params: optax.Params
) -> StoredInner:
    """Returns the inner state, with the first moment of each param written with its halves.

    Of two moments, XLA for TPU fuses the second by itself; it fuses neither where both are tied.
    """
    tree, shapes = jax.tree.structure(params), [p.shape for p in jax.tree.leaves(params)]

    def is_moment(node: Any) -> bool:
        is_like = jax.tree.structure(node) == tree
        return is_like and [jnp.shape(leaf) for leaf in jax.tree.leaves(node)] == shapes

    nodes, outer = jax.tree.flatten(inner.state, is_leaf=is_moment)
    first = next((i for i, node in enumerate(nodes) if is_moment(node)), None)
    if first is not None:
        each = zip(jax.tree.leaves(nodes[first]), encoded, modes, strict=True)
        nodes[first] = tree.unflatten(
            written_with(moment, cast(jax.Array, pair))
            if mode.is_packed and _is_like(moment, cast(jax.Array, pair))
            else moment
            for moment, pair, mode in each
        )
    return inner._replace(state=outer.unflatten(nodes))


def _is_like(moment: jax.Array, pair: jax.Array) -> bool:
    """Returns whether a moment is float32, and split over devices as a param's pair is."""
    types = jax.typeof(moment), jax.typeof(pair)
    shardings = [getattr(one, "sharding", None) for one in types]
    is_same = shardings[0] == shardings[1] and varying_axes(moment) == varying_axes(pair)
    return is_same and moment.dtype == jnp.float32


def _is_eager(given: Given) -> bool:
    """Returns whether a step is of concrete arrays.

    A transform may branch on numbers among `extra_args`, so these are not compiled.
    """
    arrays, extra = jax.tree.leaves(given[:-1]), jax.tree.leaves(given.extra_args)
    are_arrays = all(isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in arrays)
    are_arrays = are_arrays and all(isinstance(x, jax.Array) or np.ndim(x) for x in extra)
    return are_arrays and not any(isinstance(x, Tracer) for x in (*arrays, *extra))


def _run_optax(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    # Optax relies on JAX's own promotion (adam: a Python float to the power of an int32 count),
    # also where a program asks for strict.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# The branches of a step: applied, or skipped
# --------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The arguments of both branches.

    Attributes:
      params: a tree of params.
      gradients: their gradients, as they were handed over.
      inner: the inner transform's state, with the scales of its moments.
      masters: a tree like the params, of stored arrays.
    """

    params: optax.Params
    gradients: optax.Updates
    inner: StoredInner
    masters: optax.Params

    def leaves(self) -> tuple[list[jax.Array], list[Stored]]:
        """Returns the params and their stored arrays, in flattening order."""
        leaves, tree = jax.tree.flatten(self.params)
        return leaves, tree.flatten_up_to(self.masters)


Results: TypeAlias = tuple[list[Encoded], StoredInner]
"""The results of a branch: each param's, in flattening order, and the inner transform's state."""

Branch: TypeAlias = Callable[[Operands], Results]


def cond_or_select(
    flag: jax.Array, apply_step: Branch, skip_step: Branch, operands: Operands, *, tpu_selects: bool
) -> Results:
    """Computes `lax.cond` on CPUs, elsewhere a select of the results of both branches.

    XLA fuses the selects into the step, which updates each leaf in place. For a conditional,
    XLA:GPU copies params and moments once more and replicates sharded results, and XLA:TPU holds
    packed pairs beside the params. XLA:CPU would compute the step once for each result of a select,
    as XLA:TPU would for rounded params that are not packed: there `tpu_selects` is False.
    """
    apply_step = jax.jit(apply_step, inline=True)  # traced once for both

    def select(flag: jax.Array, of: Operands) -> Results:
        return selected(flag, apply_step(of), skip_step(of))

    def cond(flag: jax.Array, of: Operands) -> Results:
        return lax.cond(flag, apply_step, skip_step, of)

    def gpu(flag: jax.Array, of: Operands) -> Results:
        if jax.tree.structure(of.gradients) != jax.tree.structure(of.params):  # lookahead's pair
            return select(flag, of)
        gradients = jax.tree.map(_row_major, of.gradients, of.params)
        return select(flag, of._replace(gradients=gradients))

    tpu = select if tpu_selects else cond
    return lax.platform_dependent(flag, operands, cpu=cond, tpu=tpu, default=gpu)


def _row_major(gradient: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the gradient of a convolution's kernel in half precision in the layout of params.

    XLA:GPU gives it one of its own, and would hold moments and unpacked params in that, too. XLA of
    older JAX would gather it where it is sharded.
    """
    if gradient.ndim < 4 or param.dtype.itemsize > 2 or jax.__version_info__ < (0, 12):
        return gradient
    return with_layout_constraint(gradient, Layout(tuple(range(gradient.ndim))))


def selected(flag: jax.Array, new: T, old: T) -> T:
    """Returns the leaves of `new` where `flag`, () bool, is True, else those of `old`."""
    return jax.tree.map(lambda x, y: lax.select(flag, x, y), new, old)
