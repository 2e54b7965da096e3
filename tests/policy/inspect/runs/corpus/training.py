"""Small training runs, watched: a module of a user's own in each wing, with and without scan."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import policy

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
STEPS, ROWS, WIDTH, OUT, LAYERS = 14, 8, 16, 4, 4
Batch = Sequence[Any]  # inputs and targets


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, with the advice that is expected of it; a clean one has kind "".

    Attributes:
      run: trains and returns the records.
      path: of the advice, at its end; several are alternatives.
      step: of the advice.
      line: of the advice: the text of that line of code.
    """

    name: str
    run: Callable[[], list[dict[str, Any]]]
    kind: str = ""
    path: tuple[str, ...] = ()
    step: int = 0
    line: str = ""
    layer: int | None = None


FAULTS: list[Case] = []
CLEAN: list[Case] = []


def fault(kind: str, path: str, step: int, line: str = "", layer: int | None = None) -> Any:
    """Adds a run to the faults, named as its function is."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        name = run.__name__.strip("_").replace("_", " ")
        FAULTS.append(Case(name, run, kind, tuple(path.split(" or ")), step, line, layer))
        return run

    return add


def clean(run: Callable[[], Any]) -> Callable[[], Any]:
    """Adds a run without faults."""
    CLEAN.append(Case(run.__name__.replace("_", " "), run))
    return run


# --------------------------------------------------------------------------------------------------
# Data and loops
# --------------------------------------------------------------------------------------------------


def batches(steps: Any = STEPS, rows: Any = ROWS, **at: Any) -> Iterable[Batch]:
    """Yields inputs (rows, WIDTH) and targets (rows, OUT); `at_6=f` changes the inputs of step 6.

    `from_6=f` changes those of all steps from there on.
    """
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(WIDTH, OUT)) / 4
    for step in range(steps):
        x = rng.normal(size=(rows, WIDTH))
        y = np.tanh(x @ truth)
        for name, change in at.items():
            word, number = name.split("_")
            if step == int(number) or (word == "from" and step > int(number)):
                x = change(x)
        yield x.astype(np.float32), y.astype(np.float32)


def rows_set(value: Any, *rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a change of a batch: these examples become a value."""

    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[list(rows)] = value
        return x

    return change


def times(factor: float, *rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a change of a batch: these examples, or all, are multiplied."""
    return lambda x: x * factor if not rows else rows_set(factor * x[list(rows)], *rows)(x)


def watch(
    step: Any, state: Any, data: Iterable[Batch], *, jit: Any = jax.jit, every: int = 1
) -> list[dict[str, Any]]:
    """Trains by `step(*state, x, y)`, and returns the records as they are read from JSON.

    The step returns the new state and the loss, or, in nnx, the loss.
    """
    watched = jit(policy.monitor(step, every=every))
    snapshots = []
    for i, batch in enumerate(data):
        result, snapshot = watched(i, *state, *batch)
        state = result[:-1] if isinstance(result, tuple) else state  # nnx updates its own
        snapshots.append(snapshot)
    return [json.loads(json.dumps(one)) for each in snapshots for one in each.records()]


def squared(prediction: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(prediction.astype(F32) - y))


def step_of(apply: Callable[..., Any], tx: Any, text: str | None, loss: Any = squared) -> Any:
    """Returns a step of linen's or plain params; under a policy, `tx` is a `mixed_precision`."""

    def plain(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda params: loss(apply(params, x), y))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, value

    def mixed(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        scaled = policy.value_and_grad(
            lambda params: loss(apply(params, x), y),
            loss_scale=policy.loss_scale_of(opt_state),
            grads="compute",
        )
        value, grads = scaled(params)
        params, opt_state, _ = policy.apply_gradients(tx, params, opt_state, grads)
        return params, opt_state, value

    return plain if text is None else mixed


def wrapped(tx: Any, text: str | None, options: Mapping[str, Any] | None) -> Any:
    tx = tx or optax.sgd(1e-2)
    return tx if text is None else policy.mixed_precision(tx, text, **(options or {}))


# --------------------------------------------------------------------------------------------------
# A module of a user's own, with a fault in it or none, in each wing
# --------------------------------------------------------------------------------------------------

Body = Callable[[Any], Any]


def dtypes(dtype: Any, param_dtype: Any) -> dict[str, Any]:
    """Returns the arguments of each layer of Flax's."""
    return {"dtype": dtype, "param_dtype": param_dtype, "use_bias": False}


class Inner(flax.linen.Module):
    body: Body

    @flax.linen.compact
    def __call__(self, h):
        return self.body(h)


class Layer(flax.linen.Module):
    body: Body
    dtype: Any
    param_dtype: Any

    @flax.linen.compact
    def __call__(self, h, _=None):
        inner = Inner(self.body, name="inner")(h)
        given = dtypes(self.dtype, self.param_dtype)
        return h + flax.linen.Dense(WIDTH, name="out", **given)(inner), None


class Linen(flax.linen.Module):
    """A projection, layers around the body, and a head."""

    body: Body
    dtype: Any = F16
    param_dtype: Any = F32
    layers: int = 1
    scan: bool = False

    @flax.linen.compact
    def __call__(self, x):
        given = dtypes(self.dtype, self.param_dtype)
        h = flax.linen.Dense(WIDTH, name="up", **given)(x)
        of = (self.body, self.dtype, self.param_dtype)
        if self.scan:
            rngs: Any = {"params": True}
            stack = flax.linen.scan(
                Layer, variable_axes={"params": 0}, split_rngs=rngs, length=LAYERS
            )
            h, _ = stack(*of, name="layers")(h, None)
        else:
            for i in range(self.layers):
                h, _ = Layer(*of, name=f"layer_{i}")(h)
        return flax.linen.Dense(OUT, name="head", **given)(h)


def linen(
    body: Body,
    data: Iterable[Batch],
    *,
    tx: Any = None,
    text: str | None = None,
    options: Mapping[str, Any] | None = None,
    change: Any = lambda params: params,
    loss: Any = squared,
    every: int = 1,
    **model: Any,
) -> list[dict[str, Any]]:
    """Trains a `Linen` of a body, whose params are changed before."""
    net = Linen(body, **model)
    params = change(net.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))["params"])
    tx = wrapped(tx, text, options)
    state = params, tx.init(params)

    def apply(params, x):
        return net.apply({"params": params}, x)

    return watch(step_of(apply, tx, text, loss), state, data, every=every)


class NnxInner(nnx.Module):
    def __init__(self, body):
        self.body = body

    def __call__(self, h):
        return self.body(h)


class NnxLayer(nnx.Module):
    def __init__(self, body, dtype, param_dtype, rngs):
        given = dtypes(dtype, param_dtype) | {"rngs": rngs}
        self.inner, self.out = NnxInner(body), nnx.Linear(WIDTH, WIDTH, **given)

    def __call__(self, h):
        return h + self.out(self.inner(h))


class Nnx(nnx.Module):
    """A projection, layers around the body, and a head."""

    def __init__(self, body, dtype, param_dtype, scan, rngs):
        given = dtypes(dtype, param_dtype) | {"rngs": rngs}
        self.up = nnx.Linear(WIDTH, WIDTH, **given)
        self.head = nnx.Linear(WIDTH, OUT, **given)
        self.scan = scan
        if scan:

            def make(rngs):
                return NnxLayer(body, dtype, param_dtype, rngs)

            self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(make))(rngs)
        else:
            self.layers = NnxLayer(body, dtype, param_dtype, rngs)

    def __call__(self, x):
        h = self.up(x)
        if self.scan:
            run = nnx.scan(lambda h, layer: layer(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            h = run(h, self.layers)
        else:
            h = self.layers(h)
        return self.head(h)


def nnx_run(
    body: Body,
    data: Iterable[Batch],
    *,
    tx: Any = None,
    text: str | None = None,
    options: Mapping[str, Any] | None = None,
    change: Any = lambda model: None,
    loss: Any = squared,
    every: int = 1,
    dtype: Any = F16,
    param_dtype: Any = F32,
    scan: bool = False,
) -> list[dict[str, Any]]:
    """Trains an `Nnx` of a body, whose params are changed before."""
    from mpmodules import nnx as ours

    model = Nnx(body, dtype, param_dtype, scan, nnx.Rngs(0))
    change(model)
    tx = wrapped(tx, text, options)
    optimizer = (ours if text else nnx).Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss_fn(model):
            return loss(model(x), y)

        if text is None:
            value, grads = nnx.value_and_grad(loss_fn)(model)
        else:
            scale = policy.loss_scale_of(optimizer)
            value, grads = ours.value_and_grad(loss_fn, loss_scale=scale, grads="compute")(model)
        optimizer.update(model, grads)
        return value

    return watch(step, (model, optimizer), data, jit=nnx.jit, every=every)


def plain_params(param_dtype: Any = F32, layers: int | None = None) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 3))
    shapes: dict[str, tuple[int, ...]] = {
        "up": (WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "head": (WIDTH, OUT),
    }
    if layers is not None:
        shapes["out"] = (layers, WIDTH, WIDTH)
    return {
        name: (jax.random.normal(next(keys), shape) / 4).astype(param_dtype)
        for name, shape in shapes.items()
    }


def plain(
    body: Body,
    data: Iterable[Batch],
    *,
    tx: Any = None,
    text: str | None = None,
    options: Mapping[str, Any] | None = None,
    change: Any = lambda params: params,
    loss: Any = squared,
    every: int = 1,
    dtype: Any = F16,
    param_dtype: Any = F32,
    scan: bool = False,
    jit: Any = jax.jit,
) -> list[dict[str, Any]]:
    """Trains functions and a dict of params, by name scopes."""
    params = change(plain_params(param_dtype, LAYERS if scan else None))
    tx = wrapped(tx, text, options)

    def layer(h, w):
        with jax.named_scope("inner"):
            inner = body(h)
        with jax.named_scope("out"):
            return h + inner @ w.astype(dtype), None

    def apply(params, x):
        with jax.named_scope("up"):
            h = x.astype(dtype) @ params["up"].astype(dtype)
        if scan:
            with jax.named_scope("layers"):
                h, _ = jax.lax.scan(layer, h, params["out"])
        else:
            h, _ = layer(h, params["out"])
        with jax.named_scope("head"):
            return h @ params["head"].astype(dtype)

    state = params, tx.init(params)
    return watch(step_of(apply, tx, text, loss), state, data, jit=jit, every=every)


WINGS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "linen": linen,
    "nnx": nnx_run,
    "plain": plain,
}
