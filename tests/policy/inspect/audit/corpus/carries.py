"""Sums that loops carry, and state that calls add to, in half precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState
from jax import lax

from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    F16,
    F32,
    I32,
    X,
    plant,
    planted,
    product,
    shape,
)

PARAMS, STEPS = {"w": X}, shape(dtype=I32)
EMA, ROW = {"ema": PARAMS, "step": STEPS}, shape(4, dtype=F16)
CALL = {"backward": False, "states": {}}
SUBTRACTED, SCATTERED = {"params['w']": "sub"}, {"params['w']": "scatter-add"}


def added(*states: str) -> dict[str, str]:
    """The options of faults in calls that add to states of these key paths."""
    return dict.fromkeys(states, "add")


def zeros(x: Any) -> Any:
    return jnp.zeros(x.shape[1:], x.dtype)


def summed(add: Any, x: Any, first: Any = zeros) -> Any:
    """The result of a scan whose body returns the next carry alone."""
    return lax.scan(lambda carry, row: (add(carry, row), None), first(x), x)[0]


@planted("narrowed-carry scan")
def _a_running_mean_that_a_scan_carries(x):
    def step(state, row):
        count, mean = state
        return count + 1, mean + (row - mean) / (count + 1).astype(BF16)

    return summed(step, x, lambda x: (jnp.int32(0), zeros(x)))[1]


@planted("narrowed-carry scan(x=F16)")
def _a_histogram_that_is_set_where_its_numbers_are(x):
    def add(counts, row):
        places = row.astype(I32) % 4
        return counts.at[places].set(counts[places] + 1)

    return summed(add, x)


def _online_softmax(x, logits_of, dtype):
    def step(state, row):
        largest, total, out = state
        logits = logits_of(row).astype(dtype)
        new = jnp.maximum(largest, logits)
        scale, weight = jnp.exp(largest - new), jnp.exp(logits - new)
        out = out * scale[:, None] + weight[:, None] * row.astype(dtype)
        return new, total * scale + weight, out

    first = (jnp.full(4, -jnp.inf, dtype), jnp.zeros(4, dtype), jnp.zeros((4, 4), dtype))
    _, total, out = summed(step, x, lambda _: first)
    return out / total[:, None]


def _gradient(w, row):
    return jax.grad(lambda w: jnp.tanh((row[None] @ w).astype(F32)).sum())(w)


def layers(body: Any, first: Any) -> Any:
    return lax.scan(lambda carry, _: (body(carry), None), first, None, length=3)[0]


def _kept(w, state):
    x, kept, at = state
    x = x + jnp.tanh(product(w, x))
    return x, kept.at[at].set(x[0]), at + 1


def _gated(w, h, x):
    gate = jax.nn.sigmoid(product(w, x + h))
    return (1 - gate) * jnp.tanh(product(w, x)) + gate * h


def _compensated(state, row):
    total, lost = state
    term = row - lost
    new = total + term
    return new, (new - total) - term


def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: jnp.tanh(x @ params["w"]).astype(F32).mean())(params)


def average(ema: Any, params: Any) -> Any:
    return jax.tree.map(lambda ema, p: ema * 0.99 + p * 0.01, ema, params)


class Running(NamedTuple):
    mean: Any
    count: Any


@struct.dataclass
class Statistics:
    total: Any
    count: Any


def state_of(tx: Any) -> Any:
    return jax.eval_shape(tx.init, PARAMS)


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
MOMENTS = added("params['w']", "state[0].mu['w']", "state[0].nu['w']")
TRACE = added("params['w']", "state[0].trace['w']")
ADAM, SGD = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)
TRAIN_STATE = jax.eval_shape(
    lambda: TrainState.create(apply_fn=None, params={"w": jnp.zeros((4, 4), BF16)}, tx=ADAM)
)
_MOMENTS = ("state.opt_state[0].mu['w']", "state.opt_state[0].nu['w']")
TRAINED = added("state.params['w']", *_MOMENTS)


plant(
    """
narrowed-carry scan
    a sum that a scan carries: summed(jnp.add, x)
    an average that a scan carries: summed(lambda c, row: 0.9 * c + 0.1 * row, x)
    a product that a scan carries where it is not skipped:
        summed(lambda total, row: jnp.where(row > 0, total * row, total), x, lambda x: jnp.ones(4,
        BF16))
    a sum in one branch of a conditional:
        summed(lambda c, row: lax.cond(row[0] > 0, lambda c: c + row, lambda c: c, c), x)
    a score of beams: summed(lambda c, row: c + jnp.max(row), x, lambda x: jnp.zeros((), x.dtype))
    a linear recurrence: summed(lambda h, row: jnp.tanh(row) * h + row, x)
    a discretized state space: summed(lambda h, row: jnp.exp(row) * h + row, x)
    sums that are set in their places:
        lax.fori_loop(0, 4, lambda i, c: c.at[i % 2].set(c[i % 2] + x[i]), jnp.zeros_like(x))
    places that a function adds to:
        lax.fori_loop(0, 4, lambda i, c: c.at[i % 2].apply(lambda count: count + 1), x)
    a slice that is updated with its sum:
        lax.fori_loop(0, 4, lambda i, c: lax.dynamic_update_slice(c, lax.dynamic_slice(c, (0, 0),
        (1, 4)) + x[i][None], (0, 0)), jnp.zeros_like(x))
    a counter: lax.fori_loop(0, 1000, lambda i, c: c + 1, x[0, 0])
    steps of Euler's: lax.fori_loop(0, 100, lambda i, y: y + 0.01 * x, x)
    steps of Euler's by a function of the state:
        lax.fori_loop(0, 100, lambda i, y: y + 0.01 * jnp.tanh(y), x)
    a softmax that is computed row by row: _online_softmax(x, lambda row: row, BF16)
narrowed-carry scan(x=F32)
    a sum that a loop rounds:
        lax.fori_loop(0, 4, lambda i, c: (c.astype(F32) + x[i]).astype(BF16), jnp.zeros(4, BF16))
narrowed-carry while(x=F16, never=REVERSES)
    an average that a while loop carries:
        lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] * 0.9 + x[s[0]] * 0.1), (0,
        x[0]))[1]
    a time that a while loop carries:
        lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 0.001, jnp.tanh(s[1])), (x[0, 0],
        x))[1]
    a sum in one of three branches:
        lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, lax.switch(s[0] % 3, [lambda c: c
        + x[s[0]], lambda c: c - x[s[0]], lambda c: c], s[1])), (0, zeros(x)))[1]
narrowed-carry scan(q=F16, k=F16)
    attention block by block: _online_softmax(k, lambda row: q @ row, F16)
narrowed-carry scan(w=X, x=X)
    gradients that are accumulated:
        summed(lambda total, row: jax.tree.map(jnp.add, total, _gradient(w, row)), x, lambda _:
        jnp.zeros_like(w))
    parameters that a loop of steps subtracts gradients from:
        summed(lambda w, row: w - 0.1 * (_gradient(w, row) + 0.01 * w), x, lambda _: w)
clean(w=W, x=X)
    layers that may be skipped:
        layers(lambda x: lax.cond(x[0, 0] > 0, lambda x: x + jnp.tanh(product(w, x)), lambda x: x,
        x), x)
    layers whose inputs swap places:
        layers(lambda s: (s[1], s[0] + jnp.tanh(product(w, s[1] + jnp.tanh(s[0])))), (x, x))[0]
    two buffers that swap places: layers(lambda s: (jnp.tanh(product(w, s[1])), s[0]), (x, x))[0]
    layers that keep what they return:
        layers(functools.partial(_kept, w), (x, jnp.zeros((3, 4), BF16), 0))[1]
    a gated recurrence: summed(lambda h, row: _gated(w, h[None], row[None])[0], x)
    a sum that a scan carries in float32:
        summed(lambda c, row: c + row.astype(F32), product(w, x), lambda _: jnp.zeros(4))
    a running maximum: summed(jnp.maximum, product(w, x))
    a recurrence that a matmul feeds back:
        summed(lambda h, row: jnp.tanh(product(w, h[None])[0] + row), x)
clean(w=W, x=X, backward=False)
    attention block by block with float32 sums:
        _online_softmax(product(w, x), lambda row: x @ row, F32).astype(BF16)
    a sum that compensates for its losses:
        summed(_compensated, product(w, x), lambda x: (zeros(x), zeros(x)))[0]
narrowed-carry call(ema=PARAMS, params=PARAMS, states=added("ema['w']"))
    an average of parameters: average(ema, params)
    an average of Optax's: optax.incremental_update(params, ema, 0.01)
narrowed-carry call(state={"seen": shape()}, tokens=STEPS, states=added("state['seen']"))
    a number of tokens: {"seen": state["seen"] + tokens.astype(BF16)}
narrowed-carry call(state={"calls": shape()}, x=X, states=added("state['calls']"))
    a counter of calls: ({"calls": state["calls"] + 1}, jnp.tanh(x))
narrowed-carry call(params=PARAMS, x=X, states=SUBTRACTED)
    parameters less gradients:
        jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients(params, x))
    parameters that a step leaves where gradients are not finite:
        jax.tree.map(lambda p, g: jnp.where(jnp.isfinite(g).all(), p - 0.1 * g, p), params,
        gradients(params, x))
clean(x=X, w=X, **CALL)
    a residual block: x + jnp.tanh(x @ w)
clean(state={"x": X, **PARAMS}, **CALL)
    a residual block of a mean:
        {**state, "x": state["x"] + state["x"].mean(0, keepdims=True) @ state["w"]}
clean(ema={"w": shape(4, 4, dtype=F32)}, p=PARAMS, **CALL)
    an average in float32: jax.tree.map(lambda ema, p: ema * 0.99 + p.astype(F32) * 0.01, ema, p)
clean(state={"x": X}, x=X, **CALL)
    a largest number so far: {"x": jnp.maximum(state["x"], x)}
    decay alone: {"x": state["x"] * 0.99}
    an image that is standardized: {"x": state["x"] - state["x"].mean()}
    what is returned as it came: (state, x + 1)
    a normalization:
        wide = state["x"].astype(F32)
        centered = wide - wide.mean(-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
        {"x": (normal * x.astype(F32) + x.astype(F32)).astype(BF16)}
clean(batch={"x": X}, key=jax.eval_shape(lambda: jax.random.key(0)), **CALL)
    an image with noise: {"x": batch["x"] + jax.random.normal(key, (4, 4), BF16)}
clean(params=PARAMS, x=X, **CALL)
    gradients with weight decay:
        jax.tree.map(lambda g, p: g + 0.01 * p, gradients(params, x), params)
clean(pair=(X, X), x=X, **CALL)
    indices into a tuple that is no state: (pair[0] + x,)
narrowed-carry call(params=PARAMS, state=state_of(ADAM), x=X, states=MOMENTS)
    adam of Optax's: step_of(ADAM)(params, state, x)
narrowed-carry call(params=PARAMS, state=state_of(ADAMW), x=X, states=MOMENTS)
    adamw on a schedule of Optax's: step_of(ADAMW)(params, state, x)
narrowed-carry call(params=PARAMS, state=state_of(SGD), x=X, states=TRACE)
    sgd with momentum of Optax's: step_of(SGD)(params, state, x)
narrowed-carry call(state=EMA, params=PARAMS, states=added("state['ema']['w']"))
    an average whose rate is computed:
        rate = jnp.minimum(0.9, 1 / (state["step"] + 1).astype(F32)).astype(BF16)
        ema = jax.tree.map(lambda ema, p: ema + rate * (p - ema), state["ema"], params)
        {"ema": ema, "step": state["step"] + 1}
narrowed-carry call(state=Running(shape(4), STEPS), x=X, states=added("state.mean"))
    a running mean in a named tuple:
        mean = x.astype(F32).mean(0).astype(BF16)
        mean = state.mean + (mean - state.mean) / (state.count + 1).astype(BF16)
        Running(mean, state.count + 1), x
narrowed-carry call(state=Statistics(ROW, STEPS), x=X, states=added("state.total"))
    totals of a metric in float16:
        state.replace(total=state.total + x.max(0).astype(F16), count=state.count + 1)
narrowed-carry call(state=(X, STEPS), x=X, states=added("state[0]"))
    a state that is a tuple of arrays:
        (state[0] * 0.9 + x * 0.1, state[1] + 1), jnp.max(x)
narrowed-carry call(params=PARAMS, moments=PARAMS, x=X, states=SUBTRACTED | added("moments['w']"))
    momentum by hand:
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients(params, x))
        params = jax.tree.map(lambda p, m: p - 0.1 * (m + 0.01 * p), params, moments)
        params, moments, jnp.max(x)
narrowed-carry call(params={'w': H}, x=X, states=added("params['w']"))
    float32 updates of parameters in float16:
        {"w": (params["w"].astype(F32) + 1e-3 * x.astype(F32)).astype(F16)}
narrowed-carry call(params=PARAMS, rows=shape(4, dtype=I32), updates=X, states=SCATTERED)
    rows of a table: {"w": params["w"].at[rows].add(-0.1 * updates, unique_indices=True)}
narrowed-carry call(state=TRAIN_STATE, x=X, states=TRAINED)
    a train state of Flax:
        state.apply_gradients(grads=gradients(state.params, x))
clean(state={"h": X, **PARAMS}, x=X, **CALL)
    a gated unit:
        gate = jax.nn.sigmoid(x @ state["w"] + state["h"])
        {**state, "h": (1 - gate) * jnp.tanh(x @ state["w"] + state["h"]) + gate * state["h"]}
clean(state={"keys": X, "at": STEPS, **PARAMS}, x=X, **CALL)
    a cache of keys:
        keys = jax.lax.dynamic_update_slice(state["keys"], x[:1] @ state["w"], (state["at"], 0))
        {**state, "keys": keys}
clean(state={"total": X, "lost": X}, x=X, **CALL)
    a compensated sum:
        term = x - state["lost"]
        total = state["total"] + term
        {"total": total, "lost": (total - state["total"]) - term}
"""
)
