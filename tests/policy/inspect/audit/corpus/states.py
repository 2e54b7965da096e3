"""State in half precision that calls add to: averages, statistics, parameters, moments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState

from policy.inspect.audit.finding_kinds import CARRY
from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    F16,
    F32,
    I32,
    clean,
    faults,
    shape,
)

W, X, STEPS = {"w": shape(4, 4)}, shape(4, 4), shape(dtype=I32)


def added(states: dict[str, str], *args: Any) -> Any:
    """Faults in calls whose first argument is, or holds, the state."""
    return faults(CARRY, next(iter(states.values())), *args, states=states)


def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: jnp.tanh(x @ params["w"]).astype(F32).mean())(params)


def average(ema: Any, params: Any) -> Any:
    return jax.tree.map(lambda ema, p: ema * 0.99 + p * 0.01, ema, params)


added({"ema['w']": "add"}, W, W)(
    {
        "an average of parameters": lambda ema, params: average(ema, params),
        "an average of Optax's": lambda ema, p: optax.incremental_update(p, ema, 0.01),
    }
)


@added({"state['ema']['w']": "add"}, {"ema": W, "step": STEPS}, W)
def _an_average_whose_rate_is_computed(state, params):
    rate = jnp.minimum(0.9, 1 / (state["step"] + 1).astype(F32)).astype(BF16)
    ema = jax.tree.map(lambda ema, p: ema + rate * (p - ema), state["ema"], params)
    return {"ema": ema, "step": state["step"] + 1}


class Running(NamedTuple):
    mean: Any
    count: Any


@added({"state.mean": "add"}, Running(shape(4), STEPS), X)
def _a_running_mean_in_a_named_tuple(state, x):
    mean = x.astype(F32).mean(0).astype(BF16)
    mean = state.mean + (mean - state.mean) / (state.count + 1).astype(BF16)
    return Running(mean, state.count + 1), x


@struct.dataclass
class Statistics:
    total: Any
    count: Any


@added({"state.total": "add"}, Statistics(shape(4, dtype=F16), STEPS), X)
def _totals_of_a_metric_in_float16(state, x):
    return state.replace(total=state.total + x.max(0).astype(F16), count=state.count + 1)


@added({"state[0]": "add"}, (X, STEPS), X)
def _a_state_that_is_a_tuple_of_arrays(state, x):
    return (state[0] * 0.9 + x * 0.1, state[1] + 1), jnp.max(x)


added({"state['seen']": "add"}, {"seen": shape()}, STEPS)(
    {"a number of tokens": lambda state, tokens: {"seen": state["seen"] + tokens.astype(BF16)}}
)
added({"state['calls']": "add"}, {"calls": shape()}, X)(
    {"a counter of calls": lambda state, x: ({"calls": state["calls"] + 1}, jnp.tanh(x))}
)

# --------------------------------------------------------------------------------------------------
# Optimizers
# --------------------------------------------------------------------------------------------------

added({"params['w']": "sub"}, W, X)(
    {
        "parameters less gradients": lambda params, x: jax.tree.map(
            lambda p, g: p - 0.1 * g, params, gradients(params, x)
        ),
        "parameters that a step leaves where gradients are not finite": lambda params, x: (
            jax.tree.map(
                lambda p, g: jnp.where(jnp.isfinite(g).all(), p - 0.1 * g, p),
                params,
                gradients(params, x),
            )
        ),
    }
)


@added({"params['w']": "sub", "moments['w']": "add"}, W, W, X)
def _momentum_by_hand(params, moments, x):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients(params, x))
    params = jax.tree.map(lambda p, m: p - 0.1 * (m + 0.01 * p), params, moments)
    return params, moments, jnp.max(x)


@added({"params['w']": "add"}, {"w": shape(4, 4, dtype=F16)}, X)
def _float32_updates_of_parameters_in_float16(params, x):
    return {"w": (params["w"].astype(F32) + 1e-3 * x.astype(F32)).astype(F16)}


@added({"params['w']": "scatter-add"}, W, shape(3, dtype=I32), shape(3, 4))
def _rows_of_a_table(params, rows, updates):
    return {"w": params["w"].at[rows].add(-0.1 * updates, unique_indices=True)}


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


MOMENTS = {"state[0].mu['w']": "add", "state[0].nu['w']": "add"}
for _name, _tx, _moments in (
    ("adam", optax.adam(1e-3), MOMENTS),
    ("adamw on a schedule", optax.adamw(optax.cosine_decay_schedule(1e-3, 100)), MOMENTS),
    ("sgd with momentum", optax.sgd(0.1, momentum=0.9), {"state[0].trace['w']": "add"}),
):
    _state = jax.eval_shape(_tx.init, W)
    added({"params['w']": "add", **_moments}, W, _state, X)({f"{_name} of Optax's": step_of(_tx)})

TRAIN_STATE = jax.eval_shape(
    lambda: TrainState.create(
        apply_fn=None, params={"w": jnp.zeros((4, 4), BF16)}, tx=optax.adam(0.1)
    )
)
_TRAINED = ("params['w']", "opt_state[0].mu['w']", "opt_state[0].nu['w']")


@added({f"state.{name}": "add" for name in _TRAINED}, TRAIN_STATE, X)
def _a_train_state_of_Flax(state, x):
    return state.apply_gradients(grads=gradients(state.params, x))


# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------


def returned(*args: Any) -> Any:
    """Clean calls, which are audited as they are."""
    return clean(*args, backward=False, states={})


@returned({"h": X, **W}, X)
def _a_gated_unit(state, x):
    gate = jax.nn.sigmoid(x @ state["w"] + state["h"])
    return {**state, "h": (1 - gate) * jnp.tanh(x @ state["w"] + state["h"]) + gate * state["h"]}


@returned({"keys": X, "at": STEPS, **W}, X)
def _a_cache_of_keys(state, x):
    keys = jax.lax.dynamic_update_slice(state["keys"], x[:1] @ state["w"], (state["at"], 0))
    return {**state, "keys": keys}


@returned({"total": X, "lost": X}, X)
def _a_compensated_sum(state, x):
    term = x - state["lost"]
    total = state["total"] + term
    return {"total": total, "lost": (total - state["total"]) - term}


@returned({"x": X}, X)
def _a_normalisation(state, x):
    wide = state["x"].astype(F32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return {"x": (normal * x.astype(F32) + x.astype(F32)).astype(BF16)}


returned(X, X)({"a residual block": lambda x, w: x + jnp.tanh(x @ w)})
returned({"x": X, **W})(
    {
        "a residual block of a mean": lambda state: {
            **state,
            "x": state["x"] + (state["x"].mean(0, keepdims=True) @ state["w"]),
        }
    }
)
returned({"w": shape(4, 4, dtype=F32)}, W)(
    {
        "an average in float32": lambda ema, p: jax.tree.map(
            lambda ema, p: ema * 0.99 + p.astype(F32) * 0.01, ema, p
        )
    }
)
returned({"x": X}, X)(
    {
        "a largest number so far": lambda state, x: {"x": jnp.maximum(state["x"], x)},
        "decay alone": lambda state, x: {"x": state["x"] * 0.99},
        "an image that is standardised": lambda state, x: {"x": state["x"] - state["x"].mean()},
        "what is returned as it came": lambda state, x: (state, x + 1),
    }
)
returned({"x": X}, jax.eval_shape(lambda: jax.random.key(0)))(
    {
        "an image with noise": lambda batch, key: {
            "x": batch["x"] + jax.random.normal(key, (4, 4), BF16)
        }
    }
)
returned(W, X)(
    {
        "gradients with weight decay": lambda params, x: jax.tree.map(
            lambda g, p: g + 0.01 * p, gradients(params, x), params
        )
    }
)
returned((X, X), X)({"indices into a tuple that is no state": lambda pair, x: (pair[0] + x,)})
