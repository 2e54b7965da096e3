"""Calls that add to a state in half precision, which they are given and return, and places to plant
them in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState
from jax import lax

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def shape(*dims: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


W, X = {"w": shape(4, 4)}, shape(4, 4)
STEPS = shape(dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class StateFault:
    """A function that adds to a state in half.

    Attributes:
      name: what was planted.
      found: the primitives of the findings, by the key paths that the messages begin with.
      run: the function; its first argument is, or holds, the state.
      args: what it is called with.
    """

    name: str
    found: dict[str, str]
    run: Callable[..., Any]
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


STATE_FAULTS: list[StateFault] = []


def state_fault(name: str, found: dict[str, str], *args: Any) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        STATE_FAULTS.append(StateFault(name, found, run, args))
        return run

    return add


def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: jnp.tanh(x @ params["w"]).astype(F32).mean())(params)


# --------------------------------------------------------------------------------------------------
# Averages and sums
# --------------------------------------------------------------------------------------------------


state_fault("an average of parameters", {"ema['w']": "add"}, W, W)(
    lambda ema, params: jax.tree.map(lambda ema, p: ema * 0.99 + p * 0.01, ema, params)
)
state_fault("an average of Optax's", {"ema['w']": "add"}, W, W)(
    lambda ema, params: optax.incremental_update(params, ema, 0.01)
)


@state_fault(
    "an average whose rate is computed", {"state['ema']['w']": "add"}, {"ema": W, "step": STEPS}, W
)
def _warm_average(state, params):
    rate = jnp.minimum(0.9, 1 / (state["step"] + 1).astype(F32)).astype(BF16)
    ema = jax.tree.map(lambda ema, p: ema + rate * (p - ema), state["ema"], params)
    return {"ema": ema, "step": state["step"] + 1}


class Running(NamedTuple):
    mean: Any
    count: Any


@state_fault("a running mean in a named tuple", {"state.mean": "add"}, Running(shape(4), STEPS), X)
def _running_mean(state, x):
    mean = x.astype(F32).mean(0).astype(BF16)
    return Running(
        state.mean + (mean - state.mean) / (state.count + 1).astype(BF16), state.count + 1
    ), x


@struct.dataclass
class Statistics:
    total: Any
    count: Any


state_fault(
    "totals of a metric in float16",
    {"state.total": "add"},
    Statistics(shape(4, dtype=F16), STEPS),
    X,
)(lambda state, x: state.replace(total=state.total + x.max(0).astype(F16), count=state.count + 1))


@state_fault("a state that is a tuple of arrays", {"state[0]": "add"}, (X, STEPS), X)
def _tuple(state, x):
    average, count = state
    return (average * 0.9 + x * 0.1, count + 1), jnp.max(x)


state_fault("a number of tokens", {"state['seen']": "add"}, {"seen": shape()}, STEPS)(
    lambda state, tokens: {"seen": state["seen"] + tokens.astype(BF16)}
)
state_fault("a counter of calls", {"state['calls']": "add"}, {"calls": shape()}, X)(
    lambda state, x: ({"calls": state["calls"] + 1}, jnp.tanh(x))
)


# --------------------------------------------------------------------------------------------------
# Optimizers
# --------------------------------------------------------------------------------------------------


state_fault("parameters less gradients", {"params['w']": "sub"}, W, X)(
    lambda params, x: jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients(params, x))
)


@state_fault("momentum by hand", {"params['w']": "sub", "moments['w']": "add"}, W, W, X)
def _momentum(params, moments, x):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients(params, x))
    params = jax.tree.map(lambda p, m: p - 0.1 * (m + 0.01 * p), params, moments)
    return params, moments, jnp.max(x)


state_fault(
    "float32 updates of parameters in float16",
    {"params['w']": "add"},
    {"w": shape(4, 4, dtype=F16)},
    X,
)(lambda params, x: {"w": (params["w"].astype(F32) + 1e-3 * x.astype(F32)).astype(F16)})


@state_fault(
    "parameters that a step leaves where gradients are not finite", {"params['w']": "sub"}, W, X
)
def _skipped(params, x):
    found = gradients(params, x)
    is_finite = jnp.isfinite(found["w"]).all()
    return {"w": jnp.where(is_finite, params["w"] - 0.1 * found["w"], params["w"])}


state_fault(
    "rows of a table", {"params['w']": "scatter-add"}, W, shape(3, dtype=jnp.int32), shape(3, 4)
)(
    lambda params, rows, updates: {
        "w": params["w"].at[rows].add(-0.1 * updates, unique_indices=True)
    }
)


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


MOMENTS = {"state[0].mu['w']": "add", "state[0].nu['w']": "add"}
for _name, _tx, _moments in (
    ("adam", optax.adam(1e-3), MOMENTS),
    ("adamw on a schedule", optax.adamw(optax.cosine_decay_schedule(1e-3, 100)), MOMENTS),
    ("lamb", optax.lamb(1e-3), MOMENTS),
    ("sgd with momentum", optax.sgd(0.1, momentum=0.9), {"state[0].trace['w']": "add"}),
):
    _state = jax.eval_shape(_tx.init, W)
    state_fault(f"{_name} of Optax's", {"params['w']": "add", **_moments}, W, _state, X)(
        step_of(_tx)
    )


state_fault(
    "a train state of Flax's",
    {
        "state.params['w']": "add",
        "state.opt_state[0].mu['w']": "add",
        "state.opt_state[0].nu['w']": "add",
    },
    jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None, params={"w": jnp.zeros((4, 4), BF16)}, tx=optax.adam(0.1)
        )
    ),
    X,
)(lambda state, x: state.apply_gradients(grads=gradients(state.params, x)))


# --------------------------------------------------------------------------------------------------
# Places
# --------------------------------------------------------------------------------------------------


def _in_cond(run: Any) -> Any:
    """The function in one branch; in the other, zeros."""

    @functools.wraps(run)
    def placed(*args: Any) -> Any:
        like = jax.eval_shape(run, *args)
        zeros = lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)  # noqa: E731
        return lax.cond(jax.tree.leaves(args)[0].sum() > 0, run, zeros, *args)

    return placed


def _in_custom_vjp(run: Any) -> Any:
    ruled = jax.custom_vjp(run)
    ruled.defvjp(lambda *args: (run(*args), None), lambda _, ct: ct)
    return ruled


STATE_PLACES: dict[str, Callable[[Any], Any]] = {
    "the top level": lambda run: run,
    "jit": jax.jit,
    "jit that donates": functools.partial(jax.jit, donate_argnums=0),
    "cond": _in_cond,
    "remat": jax.checkpoint,
    "custom_vjp": _in_custom_vjp,
}
