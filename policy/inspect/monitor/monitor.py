"""`monitor`: a train step that returns statistics of itself, every so many steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.autocasting.parameters import ParamsArgument, require_params
from policy.core.messages import require_function
from policy.inspect.monitor.observing import observed
from policy.inspect.monitor.snapshot import Snapshot
from policy.inspect.monitor.step import TrainStep
from policy.inspect.monitor.step_log import StepLog
from policy.inspect.monitor.two_programs import chosen_by_host, kept_unless_finite


def monitor(
    fn: Callable[..., Any],
    *,
    every: int = 100,
    params: ParamsArgument = None,
    on_nonfinite: bool = True,
    jit: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[..., tuple[Any, Snapshot]]:
    """Returns a train step that returns statistics of its arrays beside its result.

    Every `every` steps, and in each step that is not finite, the step's program is evaluated once
    more, and values that leave its modules, gradients, params and updates are reduced to a few
    numbers on the device. Other steps don't do that. The result is the step's own.

    With `jit`, the step is compiled as two programs, of which the host runs one. Without it, the
    second evaluation is a branch of a `jax.lax.cond`, inside a `jax.jit`, `nnx.jit` or
    `jax.lax.scan` around the monitored step.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> def train_step(params, x):
    ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    ...     return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss
    >>> step = policy.monitor(train_step, every=10, jit=jax.jit)
    >>> params = {"w": jnp.ones((4, 2), jnp.bfloat16)}
    >>> (params, loss), snapshot = step(0, params, jnp.ones((8, 4)))
    >>> [(row["kind"], row["path"]) for row in snapshot.record()["rows"]]
    [('gradient', 'w'), ('param', 'w'), ('update', 'w'), ('input', 'x')]

    Args:
      fn: a train step: any function of arrays or of nnx modules, that takes params and returns new
        ones under the same keys. It is not modified.
      every: steps from one snapshot to the next.
      params: the arguments that are parameters; see `policy.audit`. None: the argument `params`,
        the field `params` of a state, `nnx.Param`s, or the first container.
      on_nonfinite: whether a step is also monitored if a floating scalar that it returns (such as
        the loss) is infinite or NaN, its new state is where the old one was not, or
        `mixed_precision` skips it. With `jit` the host then waits
        for each step, and runs one that is not finite again: the first run leaves the state that it
        takes and returns as it was. Other arguments should not be donated.
      jit: a function that compiles `fn`, such as `nnx.jit` or
        `functools.partial(jax.jit, donate_argnums=(0, 1))`. Its options are those of `fn`, but for
        `out_shardings`, of which there are two: those of the result, and None. The number of the
        step is an integer on the host.

    Returns:
      A function of the number of the step, () int32, and the arguments of `fn`. It returns the
      result of `fn` and a `Snapshot`.

    Raises:
      TypeError: `fn` is not a function, or is jitted already; `params` or `jit` is of another type.
        At the call: the number of the step is no integer scalar, or with `jit` it is traced.
      ValueError: `every` is no positive integer. At the call: there are no params, or the step
        reads the result of a callback with side effects.
    """
    require_function(fn, "monitor")
    if hasattr(fn, "lower"):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"monitor takes a train step before it is jitted, but {name} is jitted already: give "
            f"the function itself, as in policy.monitor({name}, jit=jax.jit)."
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every should be a positive number of steps, but got {every!r}.")
    if jit is not None and not callable(jit):
        raise TypeError(f"jit should be a function such as jax.jit, but got {jit!r}.")
    require_params(params)

    def watched(
        number: jax.Array, every: int, on_nonfinite: bool, args: Any, kwargs: Any
    ) -> tuple[Any, Snapshot]:
        traced = TrainStep.of(fn, args, kwargs, params)
        results, snapshot = _run(traced, number, every, on_nonfinite)
        return traced.result(results), snapshot

    if jit is None:

        def run(number: Any, args: Any, kwargs: Any) -> tuple[Any, Snapshot]:
            return watched(jnp.asarray(number), every, on_nonfinite, args, kwargs)

    else:
        like_fn = functools.wraps(fn, updated=())
        if on_nonfinite:
            plain = kept_unless_finite(fn, params)
        else:
            plain = lambda *args, **kwargs: (fn(*args, **kwargs), None)  # noqa: E731
        due = lambda *args, **kwargs: watched(jnp.int32(0), 1, False, args, kwargs)  # noqa: E731
        run = chosen_by_host(jit(like_fn(plain)), jit(like_fn(due)), every)

    @functools.wraps(fn, updated=())
    def monitored(step: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Snapshot]:
        _check_number(step, jit is not None)
        return run(step, args, kwargs)

    with contextlib.suppress(TypeError, ValueError):  # of a class without a signature
        monitored.__signature__ = _with_number(inspect.signature(fn))  # pyright: ignore
    return monitored


def _with_number(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of a monitored step, by which `jax.jit` finds static arguments."""
    name = "step" if "step" not in signature.parameters else "monitored_step"
    number = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[number, *signature.parameters.values()])


def _check_number(step: Any, on_host: bool) -> None:
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
    if on_host and isinstance(step, jax.core.Tracer):
        raise TypeError(
            "With jit=, the number of a monitored step should be an integer on the host, but it is "
            "traced: leave jit= out inside of jax.jit and jax.lax.scan."
        )


def _run(
    traced: TrainStep, number: jax.Array, every: int, on_nonfinite: bool
) -> tuple[list[Any], Snapshot]:
    """Returns the results of a step's program, and the snapshot.

    With `on_nonfinite` the step runs first, which tells whether it is finite. Without it, the
    snapshot is taken first, of arguments that the step may overwrite afterwards.
    """
    log, arrays = StepLog(), traced.arrays
    program, notes = jax.make_jaxpr(observed(traced, log), return_shape=True)(*arrays)
    keys = sorted(notes)
    is_wide = any(notes[key].dtype == jnp.float64 for key in keys)
    dtype = jnp.float64 if is_wide else jnp.float32
    count = sum(notes[key].size for key in keys)
    step = jex_core.jaxpr_as_fun(traced.jaxpr)

    def taken(arrays: list[Any]) -> jax.Array:
        found = jex_core.jaxpr_as_fun(program)(*arrays)
        return jnp.concatenate([jnp.zeros(0, dtype), *(one.astype(dtype).ravel() for one in found)])

    def numbers_if(is_taken: Any) -> jax.Array:
        return lax.cond(is_taken, taken, lambda _: jnp.zeros(count, dtype), arrays)

    is_due = number % every == 0
    if on_nonfinite:
        results = step(*arrays)
        finite = traced.finite(arrays, results)
        is_taken = is_due | ~jnp.all(finite)
        numbers = numbers_if(is_taken)
    else:
        is_taken, numbers = is_due, numbers_if(is_due)
        given, numbers = lax.optimization_barrier((arrays, numbers))
        results = step(*given)
        finite = traced.finite(arrays, results)
    scale, is_applied = traced.optimizer(arrays, results)
    snapshot = Snapshot(
        step=number.astype(jnp.int32),
        taken=is_taken,
        loss_scale=scale,
        skipped=~is_applied,
        finite=finite,
        numbers=numbers,
        layout=log.layout(traced, notes),
    )
    return results, snapshot
