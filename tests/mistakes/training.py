"""Mistakes in gradients, in the optimizer, and across devices."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import functools
import itertools
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from mpmodules import nnx
from policy import (
    DynamicLossScale,
    StaticLossScale,
    accumulate_gradients,
    apply_gradients,
    loss_scale_of,
    master_params,
    mixed_precision,
    monitor,
    select_tree,
    split_batch,
    state_shardings,
    value_and_grad,
)
from policy.optim import convert, match_updates, resync
from policy.sharding import all_reduce, collectives_of, vary
from tests.mistakes.layers import KEY, X, XNet, rngs

P = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), P)
BF16 = "mixed_bfloat16"


def loss_fn(params: Any, x: Any = X) -> Any:
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def true() -> Any:
    return value_and_grad(loss_fn)(P)[1]


def scaled() -> Any:
    return value_and_grad(loss_fn, loss_scale=1024.0, grads="compute", policy="mixed_float16")(P)[1]


def tx(**options: Any) -> Any:
    return mixed_precision(optax.adam(1e-3), BF16, **options)


def stepped(params: Any = P, state: Any = None, grads: Any = P) -> Any:
    return apply_gradients(tx(), params, tx().init(P) if state is None else state, grads)


def update(plain: Any) -> Any:
    return plain.update(scaled(), plain.init(P), P)


def donated() -> None:
    step = jax.jit(functools.partial(apply_gradients, tx()), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, P), tx().init(P)
    step(params, state, P)
    stepped(params, state)


SHOULD_RETURN = "should return a floating scalar"

GRADIENTS = {
    TypeError: {
        "loss_fn … (loss_fn)(params": lambda: value_and_grad(loss_fn(P)),
        "argnums … 'w' … (params, batch)": lambda: value_and_grad(loss_fn, P),
        f"'{BF16}' … policy=": lambda: value_and_grad(loss_fn, BF16),
        "argnums … 'params'": lambda: value_and_grad(loss_fn, argnums="params"),
        "argnums=2 … has 2": lambda: value_and_grad(loss_fn, argnums=2)(P, X),
        "argnums=0 … by position": lambda: value_and_grad(loss_fn)(params=P),
        "tuple … has_aux=True": [
            lambda: value_and_grad(lambda p: (loss_fn(p), p))(P),
            lambda: nnx.value_and_grad(lambda model: (model(X).sum(), model(X)))(XNet(rngs())),
        ],
        "has_aux=True … (loss, aux)": lambda: value_and_grad(loss_fn, has_aux=True)(P),
        "float32[2] … the mean": lambda: value_and_grad(lambda p: X @ p["b"])(P),
        f"NoneType … {SHOULD_RETURN}": lambda: value_and_grad(lambda p: None)(P),
        "n (int32[3]) … argnums": lambda: value_and_grad(loss_fn)(P | {"n": jnp.arange(3)}),
        "MixedPrecisionState … loss_scale_of(opt_state)": lambda: value_and_grad(
            loss_fn, loss_scale=tx(loss_scale="dynamic").init(P)
        ),
    },
    ValueError: {
        "'bf16' … 'compute'": lambda: value_and_grad(loss_fn, grads="bf16"),
        "'dynamc' … 'dynamic'": lambda: value_and_grad(loss_fn, loss_scale="dynamc"),
        "'dynamic' … mixed_precision … loss_scale_of(opt_state)": lambda: value_and_grad(
            loss_fn, loss_scale="dynamic"
        ),
        "loss_scale … positive … 0": lambda: value_and_grad(loss_fn, loss_scale=0),
    },
}

NAMED = "ScaledGradients"  # by JAX or Python

SCALED = {
    ValueError: {
        NAMED: [lambda: update(optax.adam(0.001)), lambda: optax.apply_updates(P, scaled())],
        "tree of the params … w/tree": lambda: stepped(grads={"w": scaled(), "b": P["b"]}),
    },
    TypeError: {
        NAMED: [lambda: scaled() * 2, lambda: jnp.ones(4) * scaled()],
        "['w'] … apply_gradients": lambda: scaled()["w"],
        "[0] … apply_gradients": lambda: list(scaled()),
        "multiply does not accept … key": lambda: jax.tree.map(lambda g: g * 2, scaled()),
        "loss_scale.unscale … apply_gradients": lambda: StaticLossScale(1024.0).unscale(scaled()),
    },
    AttributeError: {f"'items' … {NAMED}": lambda: scaled().items()},
}

_ORDER = ("tx", "params", "state", "grads")


def swapped(order: tuple[str, ...]) -> Any:
    def make() -> None:
        made = tx()
        given = {"tx": made, "params": P, "state": made.init(P), "grads": true()}
        apply_gradients(*(given[name] for name in order))

    return make


ORDERS = {
    TypeError: {
        "apply_gradients(tx, params, opt_state, grads)": [
            swapped(order) for order in itertools.permutations(_ORDER) if order != _ORDER
        ]
    }
}

STEPS = {
    TypeError: {
        "tx should … outermost": lambda: apply_gradients(optax.adam(0.001), P, None, P),
        "tuple … tx.init(params)": lambda: stepped(state=optax.adam(0.001).init(P)),
        "TrainState … its opt_state": lambda: stepped(
            state=TrainState.create(apply_fn=loss_fn, params=P, tx=tx())
        ),
    },
    ValueError: {
        "tuple instead of dict … loss, grads =": lambda: stepped(grads=value_and_grad(loss_fn)(P)),
        "tree of the params … Missing: b": lambda: stepped(grads={"w": P["w"]}),
        "b is float32[3] … [4]": lambda: stepped(grads=P | {"b": jnp.ones(3)}),
        "b is complex64[4] … complex params only": lambda: stepped(
            grads=P | {"b": jnp.ones(4, complex)}
        ),
        "b is int32[4] … floating": lambda: stepped(grads=P | {"b": jnp.arange(4)}),
        "params/b … tx.init(params)": lambda: stepped(params={"params": P}, grads={"params": P}),
        "params … update(gradients, state, params)": lambda: tx().update(P, tx().init(P)),
    },
    RuntimeError: {"Array has been deleted": donated},
}

WRAPPER = {
    TypeError: {
        "tx … str … mixed_precision(optax.adamw(1e-3), 'mixed_bfloat16')": lambda: mixed_precision(
            BF16, optax.adam(0.001)
        ),
        "tx … function … optax.adamw(1e-3)": lambda: mixed_precision(optax.adam, BF16),
        f"bfloat16 … {BF16}": lambda: mixed_precision(optax.adam(0.001), jnp.bfloat16),
        "DynamicLossScale … an instance": lambda: tx(loss_scale=DynamicLossScale),
        "key … int … jax.random.key(0)": lambda: tx(master_weights="stochastic", key=0),
        "dict … resync(params, opt_state)": lambda: resync(tx().init(P), P),
        "dict … convert(opt_state, params, to=tx)": lambda: convert(P, tx().init(P), to=tx()),
    },
    ValueError: {
        "mixed_precision already … wrap it only once": lambda: mixed_precision(tx(), BF16),
        "loss_scale … 'dynamc' … 'dynamic'": lambda: tx(loss_scale="dynamc"),
        "could not convert string to float … 'dynamic'": lambda: StaticLossScale("dynamic"),
        "period … from 1 to … 0": lambda: DynamicLossScale(period=0),
        "factor … above 1 … 1": lambda: DynamicLossScale(factor=1),
        "master_weights … 'float32' … 'full'": lambda: tx(master_weights="float32"),
        "'stochastic' … key=jax.random": lambda: tx(master_weights="stochastic"),
        "key … 'auto' … leave key out": lambda: tx(key=KEY),
        "'remainder' … float16 … 'auto'": lambda: mixed_precision(
            optax.adam(0.001), "float16", loss_scale=2.0, master_weights="remainder"
        ).init(HALF),
        "clip_global_norm … positive … 0": lambda: tx(clip_global_norm=0),
        "skip_nonfinite=False … leave skip_nonfinite=True": lambda: tx(
            loss_scale="dynamic", skip_nonfinite=False
        ),
        "n is int32 … Keep integers out": lambda: tx().init({"n": jnp.arange(3)}),
        "w is float8 … 16 bits": lambda: tx().init({"w": jnp.ones(3, jnp.float8_e4m3fn)}),
        "w is NumPy's float64 … cast_floating( … enable_x64": lambda: tx().init({"w": np.ones(3)}),
        "b is float32[4] of type ShapeDtypeStruct … eval_shape(tx.init": lambda: tx().init(
            jax.eval_shape(lambda: P)
        ),
        "opt_state … mixed_precision(tx": lambda: loss_scale_of(optax.adam(0.001).init(P)),
        "MixedPrecision … .init(params)": lambda: loss_scale_of(tx(loss_scale=2.0)),
        "MixedPrecisionState … master_params(params, opt_state)": lambda: master_params(
            tx().init(P), P
        ),
        "'param' … 'grads', 'params'": lambda: match_updates(optax.adam(0.001), to="param"),
    },
    UserWarning: {
        "without any array … variables['params']": lambda: tx().init({}),
        "'batch_stats' … tx.init(variables['params'])": lambda: tx().init(
            {"params": P, "batch_stats": {"mean": jnp.zeros(4)}}
        ),
    },
    AssertionError: {"dict … select_tree(finite, new, old)": lambda: select_tree(P, P, True)},
}

DEVICES = {
    ValueError: {
        "multiple of 3 … 10": lambda: split_batch(jnp.ones((10, 4)), 3),
        "count … split_batch(batch, count)": lambda: split_batch(2, X),
        "n () … share their first axis": lambda: split_batch({"n": jnp.float32(1)}, 2),
        "x (2, 4) … y (4,)": lambda: split_batch({"x": X, "y": jnp.ones(4)}, 2),
        "microbatches … split_batch(batch": lambda: accumulate_gradients(
            value_and_grad(loss_fn), P, {}
        ),
        "'data' … jax.shard_map": lambda: all_reduce(P, "data", "bf16"),
        "'dat' … shard_map": lambda: jax.vmap(lambda p: vary(p, "dat", "bf16"), axis_name="data")(
            P
        ),
        f"'{BF16}' … bf16,": lambda: jax.vmap(lambda p: all_reduce(p, "i", BF16), axis_name="i")(P),
        "int8 … floating": lambda: jax.vmap(lambda p: all_reduce(p, "i", jnp.int8), axis_name="i")(
            P
        ),
        "w has None … device_put": lambda: state_shardings(tx(), {"w": np.ones(3)}),
        "'trace' … 'traced'": lambda: collectives_of(loss_fn, P, stage="trace"),
    },
    TypeError: {
        "value_and_grad_fn … value_and_grad(loss_fn)": lambda: accumulate_gradients(
            loss_fn, P, split_batch(X, 2)
        ),
        "accumulate_gradients … a function … dict": lambda: accumulate_gradients(
            P, value_and_grad(loss_fn), split_batch(X, 2)
        ),
        "dict … state_shardings(tx, params)": lambda: state_shardings(P, tx()),
        "collectives_of … a function": lambda: collectives_of(loss_fn(P)),
    },
}


def sgd(params: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def asking(params: Any, x: Any) -> Any:
    rate = jax.experimental.io_callback(
        lambda: np.float32(0.1), jax.ShapeDtypeStruct((), "float32")
    )
    return jax.tree.map(lambda p: p - rate, params), jnp.mean(x)


MONITORS = {
    TypeError: {
        "sgd is jitted already … policy.monitor(sgd, jit=jax.jit)": [
            lambda: monitor(jax.jit(sgd)),
            lambda: monitor(nnx.jit(sgd)),
        ],
        "monitor … a function": lambda: monitor(P),
        "its number, an integer … float … step(i, *args)": lambda: monitor(sgd)(0.5, P, X),
        "its number, an integer … float32[4, 4]": lambda: monitor(sgd)(P["w"], P, X),
        "its number, an integer … dict": lambda: monitor(sgd)(P, X),
        "jit … a function such as jax.jit … got True": lambda: monitor(sgd, jit=True),
        "traced: leave jit= out": lambda: jax.jit(monitor(sgd, jit=jax.jit))(0, P, X),
        "params … positions or names": lambda: monitor(sgd, params=P),
    },
    ValueError: {
        "every … positive … got 0": lambda: monitor(sgd, every=0),
        "every … positive … got 2.5": lambda: monitor(sgd, every=2.5),
        "no params … params='weights'": [
            lambda: monitor(loss_fn)(0, P, X),
            lambda: monitor(sgd, params=1)(0, P, X),
        ],
        "args[1] is donated … on_nonfinite=False": lambda: monitor(
            lambda params, x: (*sgd(params, x), 2 * x),
            jit=functools.partial(jax.jit, donate_argnums=1),
        )(1, jax.tree.map(jnp.copy, P), jnp.copy(X)),
        "io_callback at training.py: … jax.pure_callback": lambda: monitor(asking)(0, P, X),
        "holds 2 steps of a scan: call records()": lambda: jax.lax.scan(
            lambda p, i: monitor(lambda p: jax.tree.map(jnp.negative, p))(i, p), P, jnp.arange(2)
        )[1].record(),
    },
}
