"""Mistakes in gradients, in the optimizer, and across devices."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from mpmodules import nnx
from policy import (
    DynamicLossScale,
    StaticLossScale,
    apply_gradients,
    loss_scale_of,
    master_params,
    mixed_precision,
    select_tree,
    value_and_grad,
)
from policy.grads import accumulate_gradients, split_batch
from policy.optim import convert, match_updates, resync, state_shardings
from policy.sharding import all_reduce, collectives_of, vary
from tests.mistakes.layers import XNet, rngs
from tests.mistakes.table import KEY, Mistake, X

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


# --- gradients ------------------------------------------------------------------------------------

SHOULD_RETURN = "should return a floating scalar"

GRADIENTS = [
    Mistake(
        "the loss instead of its function",
        lambda: value_and_grad(loss_fn(P)),
        TypeError,
        ("loss_fn", "(loss_fn)(params"),
    ),
    Mistake(
        "params beside the function",
        lambda: value_and_grad(loss_fn, P),
        TypeError,
        ("argnums", "'w'", "(params, batch)"),
    ),
    Mistake(
        "a policy by position",
        lambda: value_and_grad(loss_fn, BF16),
        TypeError,
        (f"'{BF16}'", "policy="),
    ),
    Mistake(
        "a name for argnums",
        lambda: value_and_grad(loss_fn, argnums="params"),
        TypeError,
        ("argnums", "'params'"),
    ),
    Mistake(
        "argnums beyond the call",
        lambda: value_and_grad(loss_fn, argnums=2)(P, X),
        TypeError,
        ("argnums=2", "has 2"),
    ),
    Mistake(
        "params by keyword",
        lambda: value_and_grad(loss_fn)(params=P),
        TypeError,
        ("argnums=0", "by position"),
    ),
    Mistake(
        "a dtype for grads",
        lambda: value_and_grad(loss_fn, grads="bf16"),
        ValueError,
        ("'bf16'", "'compute'"),
    ),
    Mistake(
        "has_aux forgotten",
        lambda: value_and_grad(lambda p: (loss_fn(p), p))(P),
        TypeError,
        ("tuple", "has_aux=True"),
    ),
    Mistake(
        "has_aux without aux",
        lambda: value_and_grad(loss_fn, has_aux=True)(P),
        TypeError,
        ("has_aux=True", "(loss, aux)"),
    ),
    Mistake(
        "aux of two parts",
        lambda: value_and_grad(lambda p: (loss_fn(p), 1, 2), has_aux=True)(P),
        TypeError,
        ("has_aux=True", "tuple of 3", "(loss, aux)"),
    ),
    Mistake(
        "a loss for each example",
        lambda: value_and_grad(lambda p: X @ p["b"])(P),
        TypeError,
        ("float32[2]", "the mean"),
    ),
    Mistake(
        "a loss that is not returned",
        lambda: value_and_grad(lambda p: None)(P),
        TypeError,
        ("NoneType", SHOULD_RETURN),
    ),
    Mistake(
        "an integer among the params",
        lambda: value_and_grad(loss_fn)(P | {"n": jnp.arange(3)}),
        TypeError,
        ("n (int32)", "argnums"),
    ),
    Mistake(
        "a PRNG key among the params",
        lambda: value_and_grad(loss_fn)(P | {"key": KEY}),
        TypeError,
        ("key (key<", "outside"),
    ),
    Mistake(
        "an nnx model by policy's",
        lambda: value_and_grad(lambda model: model(X).sum())(XNet(rngs())),
        TypeError,
        ("XNet", "mpmodules.nnx.value_and_grad"),
    ),
    Mistake(
        "has_aux forgotten in nnx",
        lambda: nnx.value_and_grad(lambda model: (model(X).sum(), model(X)))(XNet(rngs())),
        TypeError,
        ("tuple", "has_aux=True"),
    ),
    Mistake(
        "a vector in nnx",
        lambda: nnx.value_and_grad(lambda model: model(X))(XNet(rngs())),
        TypeError,
        ("[2, 4]", "mean"),
    ),
    Mistake(
        "a loss scale misspelt",
        lambda: value_and_grad(loss_fn, loss_scale="dynamc"),
        ValueError,
        ("'dynamc'", "'dynamic'"),
    ),
    Mistake(
        "the optimizer's text as loss scale",
        lambda: value_and_grad(loss_fn, loss_scale="dynamic"),
        ValueError,
        ("'dynamic'", "mixed_precision", "loss_scale_of(opt_state)"),
    ),
    Mistake(
        "a whole state as loss scale",
        lambda: value_and_grad(loss_fn, loss_scale=tx(loss_scale="dynamic").init(P)),
        TypeError,
        ("MixedPrecisionState", "loss_scale_of(opt_state)"),
    ),
    Mistake(
        "a loss scale of zero",
        lambda: value_and_grad(loss_fn, loss_scale=0),
        ValueError,
        ("loss_scale", "positive", "0"),
    ),
]

NAMED = ("ScaledGradients",)  # by JAX or Python

SCALED = [
    Mistake("to optax.adam", lambda: update(optax.adam(1e-3)), ValueError, NAMED),
    Mistake("to optax.apply_updates", lambda: optax.apply_updates(P, scaled()), ValueError, NAMED),
    Mistake("times a number", lambda: scaled() * 2, TypeError, NAMED),
    Mistake("an array times them", lambda: jnp.ones(4) * scaled(), TypeError, NAMED),
    Mistake("one of them", lambda: scaled()["w"], TypeError, ("['w']", "apply_gradients")),
    Mistake("an attribute", lambda: scaled().items(), AttributeError, ("'items'", *NAMED)),
    Mistake("in a loop", lambda: list(scaled()), TypeError, ("[0]", "apply_gradients")),
    Mistake(
        "mapped over",
        lambda: jax.tree.map(lambda g: g * 2, scaled()),
        TypeError,
        ("multiply does not accept", "key"),
    ),
    Mistake(
        "unscaled by hand",
        lambda: StaticLossScale(1024.0).unscale(scaled()),
        TypeError,
        ("loss_scale.unscale", "apply_gradients"),
    ),
    Mistake(
        "inside of a tree",
        lambda: stepped(grads={"w": scaled(), "b": P["b"]}),
        ValueError,
        ("tree of the params", "w/tree"),
    ),
]

# --- the step -------------------------------------------------------------------------------------

_ORDER = ("tx", "params", "state", "grads")


def swapped(order: tuple[str, ...]) -> Any:
    def make() -> None:
        made = tx()
        given = {"tx": made, "params": P, "state": made.init(P), "grads": true()}
        apply_gradients(*(given[name] for name in order))

    return make


ORDERS = [
    Mistake(
        f"apply_gradients({', '.join(order)})",
        swapped(order),
        TypeError,
        ("apply_gradients(tx, params, opt_state, grads)",),
    )
    for order in itertools.permutations(_ORDER)
    if order != _ORDER
]

STEPS = [
    Mistake(
        "a plain optimizer",
        lambda: apply_gradients(optax.adam(1e-3), P, None, P),
        TypeError,
        ("tx should", "Wrap it first"),
    ),
    Mistake(
        "a plain optimizer's state",
        lambda: stepped(state=optax.adam(1e-3).init(P)),
        TypeError,
        ("tuple", "tx.init(params)"),
    ),
    Mistake(
        "a TrainState as state",
        lambda: stepped(state=TrainState.create(apply_fn=loss_fn, params=P, tx=tx())),
        TypeError,
        ("TrainState", "its opt_state"),
    ),
    Mistake(
        "the loss among the gradients",
        lambda: stepped(grads=value_and_grad(loss_fn)(P)),
        ValueError,
        ("tuple instead of dict", "loss, grads ="),
    ),
    Mistake(
        "a gradient that is missing",
        lambda: stepped(grads={"w": P["w"]}),
        ValueError,
        ("tree of the params", "Missing: b"),
    ),
    Mistake(
        "a gradient of another shape",
        lambda: stepped(grads=P | {"b": jnp.ones(3)}),
        ValueError,
        ("b is float32[3]", "[4]"),
    ),
    Mistake(
        "an integer gradient",
        lambda: stepped(grads=P | {"b": jnp.arange(4)}),
        ValueError,
        ("b is int32[4]", "floating"),
    ),
    Mistake(
        "params of another tree",
        lambda: stepped(params={"params": P}, grads={"params": P}),
        ValueError,
        ("params/b", "tx.init(params)"),
    ),
    Mistake(
        "donated buffers again",
        donated,
        RuntimeError,
        ("Array has been deleted",),
    ),
    Mistake(
        "update without params",
        lambda: tx().update(P, tx().init(P)),
        ValueError,
        ("params", "update(gradients, state, params)"),
    ),
]

WRAPPER = [
    Mistake(
        "tx and policy swapped",
        lambda: mixed_precision(BF16, optax.adam(1e-3)),
        TypeError,
        ("tx", "str", "comes second"),
    ),
    Mistake(
        "a transform that is not made",
        lambda: mixed_precision(optax.adam, BF16),
        TypeError,
        ("tx", "call it, adam("),
    ),
    Mistake(
        "a dtype as policy",
        lambda: mixed_precision(optax.adam(1e-3), jnp.bfloat16),
        TypeError,
        ("bfloat16", BF16),
    ),
    Mistake(
        "wrapped twice",
        lambda: mixed_precision(tx(), BF16),
        ValueError,
        ("mixed_precision already", "wrap it only once"),
    ),
    Mistake(
        "wrapped inside",
        lambda: mixed_precision(optax.chain(optax.clip(1.0), tx()), BF16).init(P),
        ValueError,
        ("already contains a mixed_precision", "outermost"),
    ),
    Mistake(
        "loss_scale misspelt",
        lambda: tx(loss_scale="dynamc"),
        ValueError,
        ("loss_scale", "'dynamc'", "'dynamic'"),
    ),
    Mistake(
        "loss_scale switched on",
        lambda: tx(loss_scale=True),
        TypeError,
        ("loss_scale", "True", "'dynamic'"),
    ),
    Mistake(
        "the class of a loss scale",
        lambda: tx(loss_scale=DynamicLossScale),
        TypeError,
        ("DynamicLossScale", "an instance"),
    ),
    Mistake(
        "a text in a loss scale",
        lambda: StaticLossScale("dynamic"),
        ValueError,
        ("could not convert string to float", "'dynamic'"),
    ),
    Mistake(
        "a loss scale of NaN",
        lambda: tx(loss_scale=float("nan")),
        ValueError,
        ("loss_scale", "nan", "positive"),
    ),
    Mistake(
        "a period of 0",
        lambda: DynamicLossScale(period=0),
        ValueError,
        ("period", "from 1 to", "0"),
    ),
    Mistake(
        "a factor of 1", lambda: DynamicLossScale(factor=1), ValueError, ("factor", "above 1", "1")
    ),
    Mistake(
        "a dtype for masters",
        lambda: tx(master_weights="float32"),
        ValueError,
        ("master_weights", "'float32'", "'full'"),
    ),
    Mistake(
        "chance without a key",
        lambda: tx(master_weights="stochastic"),
        ValueError,
        ("'stochastic'", "key=jax.random"),
    ),
    Mistake(
        "a seed for a key",
        lambda: tx(master_weights="stochastic", key=0),
        TypeError,
        ("key", "int", "jax.random.key(0)"),
    ),
    Mistake(
        "a key for nothing", lambda: tx(key=KEY), ValueError, ("key", "'auto'", "leave key out")
    ),
    Mistake(
        "remainders of float16",
        lambda: mixed_precision(
            optax.adam(1e-3), "float16", loss_scale=2.0, master_weights="remainder"
        ).init(HALF),
        ValueError,
        ("'remainder'", "float16", "'auto'"),
    ),
    Mistake(
        "a policy for moments",
        lambda: tx(moment_dtype=BF16),
        ValueError,
        ("moment_dtype", f"'{BF16}'", "bfloat16"),
    ),
    Mistake(
        "a moment misspelt",
        lambda: tx(moment_dtype={"nue": "bf16"}).init(P),
        ValueError,
        ("'nue'", "count, mu, nu"),
    ),
    Mistake(
        "a moment that never decays",
        lambda: tx(moment_dtype={"nu": "bf16"}).init(P),
        ValueError,
        ("'nu'", "0.999", "key="),
    ),
    Mistake(
        "a clip of 0",
        lambda: tx(clip_global_norm=0),
        ValueError,
        ("clip_global_norm", "positive", "0"),
    ),
    Mistake(
        "a dynamic scale that never looks",
        lambda: tx(loss_scale="dynamic", skip_nonfinite=False),
        ValueError,
        ("skip_nonfinite=False", "leave skip_nonfinite=True"),
    ),
    Mistake(
        "an integer param",
        lambda: tx().init({"n": jnp.arange(3)}),
        ValueError,
        ("n is int32", "Keep such leaves"),
    ),
    Mistake(
        "a PRNG key as param",
        lambda: tx().init({"key": KEY}),
        ValueError,
        ("key is key<", "such leaves out"),
    ),
    Mistake(
        "a Python number as param",
        lambda: tx().init({"w": 1.0}),
        ValueError,
        ("w is float", "floating arrays"),
    ),
    Mistake(
        "8-bit params",
        lambda: tx().init({"w": jnp.ones(3, jnp.float8_e4m3fn)}),
        ValueError,
        ("w is float8", "16 bits"),
    ),
    Mistake(
        "NumPy's float64",
        lambda: tx().init({"w": np.ones(3)}),
        ValueError,
        ("w is NumPy's float64", "cast_floating(", "enable_x64"),
    ),
    Mistake(
        "shapes for params",
        lambda: tx().init(jax.eval_shape(lambda: P)),
        ValueError,
        ("b, w", "eval_shape(tx.init"),
    ),
    Mistake(
        "no params",
        lambda: tx().init({}),
        UserWarning,
        ("without any array", "variables['params']"),
    ),
    Mistake(
        "running statistics as params",
        lambda: tx().init({"params": P, "batch_stats": {"mean": jnp.zeros(4)}}),
        UserWarning,
        ("'batch_stats'", "tx.init(variables['params'])"),
    ),
    Mistake(
        "the scale of a plain state",
        lambda: loss_scale_of(optax.adam(1e-3).init(P)),
        ValueError,
        ("opt_state", "mixed_precision(tx"),
    ),
    Mistake(
        "the scale of a transform",
        lambda: loss_scale_of(tx(loss_scale=2.0)),
        ValueError,
        ("MixedPrecision", ".init(params)"),
    ),
    Mistake(
        "master_params swapped",
        lambda: master_params(tx().init(P), P),
        ValueError,
        ("MixedPrecisionState", "master_params(params, opt_state)"),
    ),
    Mistake(
        "resync swapped",
        lambda: resync(tx().init(P), P),
        TypeError,
        ("dict", "resync(params, opt_state)"),
    ),
    Mistake(
        "convert swapped",
        lambda: convert(P, tx().init(P), to=tx()),
        TypeError,
        ("dict", "convert(opt_state, params, to=tx)"),
    ),
    Mistake(
        "match_updates misspelt",
        lambda: match_updates(optax.adam(1e-3), to="param"),
        ValueError,
        ("'param'", "'grads', 'params'"),
    ),
    Mistake(
        "select_tree swapped",
        lambda: select_tree(P, P, True),
        AssertionError,
        ("dict", "select_tree(finite, new, old)"),
    ),
]

# --- microbatches and devices ---------------------------------------------------------------------

DEVICES = [
    Mistake(
        "a batch that can't be split",
        lambda: split_batch(jnp.ones((10, 4)), 3),
        ValueError,
        ("multiple of 3", "(10, 4)"),
    ),
    Mistake("no microbatches", lambda: split_batch(X, 0), ValueError, ("count", "at least 1", "0")),
    Mistake(
        "split_batch swapped",
        lambda: split_batch(2, X),
        ValueError,
        ("count", "split_batch(batch, count)"),
    ),
    Mistake(
        "a scalar in the batch",
        lambda: split_batch({"n": jnp.float32(1)}, 2),
        ValueError,
        ("n has shape ()", "multiple of 2"),
    ),
    Mistake(
        "labels of another length",
        lambda: split_batch({"x": X, "y": jnp.ones(4)}, 2),
        ValueError,
        ("x (2, 4)", "y (4,)"),
    ),
    Mistake(
        "a loss instead of its gradients",
        lambda: accumulate_gradients(loss_fn, P, split_batch(X, 2)),
        TypeError,
        ("value_and_grad_fn", "value_and_grad(loss_fn)"),
    ),
    Mistake(
        "the gradients' function second",
        lambda: accumulate_gradients(P, value_and_grad(loss_fn), split_batch(X, 2)),
        TypeError,
        ("accumulate_gradients", "a function", "dict"),
    ),
    Mistake(
        "no batch",
        lambda: accumulate_gradients(value_and_grad(loss_fn), P, {}),
        ValueError,
        ("microbatches", "split_batch(batch"),
    ),
    Mistake(
        "all_reduce outside of shard_map",
        lambda: all_reduce(P, "data", "bf16"),
        ValueError,
        ("'data'", "jax.shard_map"),
    ),
    Mistake(
        "an axis misspelt",
        lambda: jax.vmap(lambda p: vary(p, "dat", "bf16"), axis_name="data")(P),
        ValueError,
        ("'dat'", "shard_map"),
    ),
    Mistake(
        "a policy for a sum",
        lambda: jax.vmap(lambda p: all_reduce(p, "i", BF16), axis_name="i")(P),
        ValueError,
        (f"'{BF16}'", "bf16,"),
    ),
    Mistake(
        "sums in integers",
        lambda: jax.vmap(lambda p: all_reduce(p, "i", jnp.int8), axis_name="i")(P),
        ValueError,
        ("int8", "floating"),
    ),
    Mistake(
        "state_shardings swapped",
        lambda: state_shardings(P, tx()),
        TypeError,
        ("dict", "state_shardings(tx, params)"),
    ),
    Mistake(
        "params that lie nowhere",
        lambda: state_shardings(tx(), {"w": np.ones(3)}),
        ValueError,
        ("w has None", "device_put"),
    ),
    Mistake(
        "a stage misspelt",
        lambda: collectives_of(loss_fn, P, stage="trace"),
        ValueError,
        ("'trace'", "'traced'"),
    ),
    Mistake(
        "the result of a step",
        lambda: collectives_of(loss_fn(P)),
        TypeError,
        ("collectives_of", "a function"),
    ),
]
