"""`monitor`: a train step that returns statistics of itself, every so many steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.autocasting.parameters import ParamsArgument, require_params
from policy.core.messages import require_function
from policy.inspect.monitor.keep import Keep
from policy.inspect.monitor.observing import observed
from policy.inspect.monitor.snapshot import Kind, Snapshot
from policy.inspect.monitor.step import TrainStep
from policy.inspect.monitor.step_log import StepLog


def monitor(
    fn: Callable[..., Any],
    *,
    every: int = 100,
    params: ParamsArgument = None,
    keep: Mapping[str, Kind | Collection[Kind]] | None = None,
    on_nonfinite: bool = True,
) -> Callable[..., tuple[Any, Snapshot]]:
    """Returns a train step that returns statistics of its arrays beside its result.

    Every `every` steps, and in each step that is not finite, the step's program is evaluated once
    more, and values that leave its modules, gradients, params and updates are reduced to a few
    numbers on the device. That is a branch of a `jax.lax.cond`: other steps don't run it. The
    result is the step's own.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> def train_step(params, x):
    ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    ...     return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss
    >>> step = jax.jit(policy.monitor(train_step, every=10), donate_argnums=1)
    >>> params = {"w": jnp.ones((4, 2), jnp.bfloat16)}
    >>> (params, loss), snapshot = step(0, params, jnp.ones((8, 4)))
    >>> [(row["kind"], row["path"]) for row in snapshot.record()["rows"]]
    [('gradient', 'w'), ('param', 'w'), ('update', 'w'), ('input', 'x')]

    Args:
      fn: a train step: any function of arrays or of nnx modules, that takes params and returns new
        ones under the same keys. It is not modified. `jax.jit` and `nnx.jit` go around the
        monitored step: `nnx.jit(policy.monitor(train_step))`.
      every: steps from one snapshot to the next.
      params: the arguments that are parameters; see `policy.audit`. None: the argument `params`,
        the field `params` of a state, `nnx.Param`s, or the first container.
      keep: kinds of rows by module path, with patterns as in `PolicyRules`; modules that no pattern
        matches are left out. The kinds are "activation", "cotangent", "gradient", "param",
        "update", "codes" and "input". None keeps all.
      on_nonfinite: whether a step is also monitored if a floating scalar that it returns (such as
        the loss) is infinite or NaN, or `mixed_precision` skips it. A step that is not monitored
        takes 4.2% more cycles on v5e for a decoder with 29 million params, and 3.5% with False, by
        the compiler (`benchmarks/accel/monitor.py`); 0.3% with one million.

    Returns:
      A function of the number of the step, () int32, and the arguments of `fn`. It returns the
      result of `fn` and a `Snapshot`.

    Raises:
      TypeError: `fn` is not a function, or is jitted already; `keep` or `params` is of another
        type. At the call: the number of the step is no integer scalar.
      ValueError: `every` is no positive integer; a kind in `keep` is unknown. At the call: there
        are no params, a pattern in `keep` matches nothing, or the step reads the result of a
        callback with side effects.
    """
    require_function(fn, "monitor")
    if hasattr(fn, "lower"):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"monitor takes a train step before it is jitted, but {name} is jitted already: write "
            f"jax.jit(policy.monitor({name})) around the function itself."
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every should be a positive number of steps, but got {every!r}.")
    require_params(params)
    Keep(keep)

    @functools.wraps(fn, updated=())
    def monitored(step: Any, *args: Any, **kwargs: Any) -> tuple[Any, Snapshot]:
        number = _checked_number(step)
        traced = TrainStep.of(fn, args, kwargs, params)
        results, snapshot = _run(traced, number, every, Keep(keep), on_nonfinite)
        return traced.result(results), snapshot

    return monitored


def _checked_number(step: Any) -> jax.Array:
    dtype, shape = getattr(step, "dtype", type(step)), np.shape(step)
    is_integer = isinstance(step, int) or (
        hasattr(step, "dtype") and jnp.issubdtype(step.dtype, jnp.integer)
    )
    if isinstance(step, bool) or not is_integer or shape != ():
        kind = f"{dtype}{list(shape)}" if hasattr(step, "dtype") else type(step).__name__
        raise TypeError(
            f"The first argument of a monitored step is its number, an integer, but got {kind}: "
            "call step(i, *args)."
        )
    return jnp.asarray(step)


def _run(
    traced: TrainStep, number: jax.Array, every: int, keep: Keep, on_nonfinite: bool
) -> tuple[list[Any], Snapshot]:
    """Returns the results of a step's program, and the snapshot.

    The equations that tell whether the step is finite run first. Then the snapshot is taken, of
    arguments that the rest of the program may overwrite afterwards.
    """
    log, arrays = StepLog(), traced.arrays
    program, notes = jax.make_jaxpr(observed(traced, log, keep), return_shape=True)(*arrays)
    keep.check()
    layout = log.layout(traced, notes)
    keys = sorted(notes)
    is_wide = any(notes[key].dtype == jnp.float64 for key in keys)
    dtype = jnp.float64 if is_wide else jnp.float32
    count = sum(notes[key].size for key in keys)

    def taken(arrays: list[Any]) -> jax.Array:
        found = jex_core.jaxpr_as_fun(program)(*arrays)
        return jnp.concatenate([jnp.zeros(0, dtype), *(one.astype(dtype).ravel() for one in found)])

    parts = traced.parts(on_nonfinite)
    flags, between = parts.begin(arrays)
    is_finite = functools.reduce(jnp.logical_and, map(_is_finite, flags), jnp.array(True))
    is_taken = (number % every == 0) | ~is_finite
    numbers = lax.cond(is_taken, taken, lambda _: jnp.zeros(count, dtype), arrays)
    arrays, numbers = lax.optimization_barrier((arrays, numbers))
    results = parts.finish(arrays, between)
    scale, finite = traced.optimizer(arrays, results)
    snapshot = Snapshot(
        step=number.astype(jnp.int32),
        taken=is_taken,
        reason=jnp.where(is_taken, 2 - is_finite.astype(jnp.int32), 0),
        loss_scale=scale,
        skipped=~finite,
        numbers=numbers,
        layout=layout,
    )
    return results, snapshot


def _is_finite(flag: jax.Array) -> jax.Array:
    return flag if flag.dtype == bool else jnp.isfinite(flag)
