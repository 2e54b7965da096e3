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
from tests.mistakes.common import KEY, X
from tests.mistakes.layers import XNet, rngs

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

GRADIENTS = {
    TypeError: {
        "the loss instead of its function": (
            lambda: value_and_grad(loss_fn(P)),
            "loss_fn",
            "(loss_fn)(params",
        ),
        "params beside the function": (
            lambda: value_and_grad(loss_fn, P),
            "argnums",
            "'w'",
            "(params, batch)",
        ),
        "a policy by position": (lambda: value_and_grad(loss_fn, BF16), f"'{BF16}'", "policy="),
        "a name for argnums": (
            lambda: value_and_grad(loss_fn, argnums="params"),
            "argnums",
            "'params'",
        ),
        "argnums beyond the call": (
            lambda: value_and_grad(loss_fn, argnums=2)(P, X),
            "argnums=2",
            "has 2",
        ),
        "params by keyword": (
            lambda: value_and_grad(loss_fn)(params=P),
            "argnums=0",
            "by position",
        ),
        "has_aux forgotten": (
            lambda: value_and_grad(lambda p: (loss_fn(p), p))(P),
            "tuple",
            "has_aux=True",
        ),
        "has_aux without aux": (
            lambda: value_and_grad(loss_fn, has_aux=True)(P),
            "has_aux=True",
            "(loss, aux)",
        ),
        "a loss for each example": (
            lambda: value_and_grad(lambda p: X @ p["b"])(P),
            "float32[2]",
            "the mean",
        ),
        "a loss that is not returned": (
            lambda: value_and_grad(lambda p: None)(P),
            "NoneType",
            SHOULD_RETURN,
        ),
        "an integer among the params": (
            lambda: value_and_grad(loss_fn)(P | {"n": jnp.arange(3)}),
            "n (int32[3])",
            "argnums",
        ),
        "an nnx model by policy's": (
            lambda: value_and_grad(lambda model: model(X).sum())(XNet(rngs())),
            "XNet",
            "mpmodules.nnx.value_and_grad",
        ),
        "has_aux forgotten in nnx": (
            lambda: nnx.value_and_grad(lambda model: (model(X).sum(), model(X)))(XNet(rngs())),
            "tuple",
            "has_aux=True",
        ),
        "a whole state as loss scale": (
            lambda: value_and_grad(loss_fn, loss_scale=tx(loss_scale="dynamic").init(P)),
            "MixedPrecisionState",
            "loss_scale_of(opt_state)",
        ),
    },
    ValueError: {
        "a dtype for grads": (lambda: value_and_grad(loss_fn, grads="bf16"), "'bf16'", "'compute'"),
        "a loss scale misspelt": (
            lambda: value_and_grad(loss_fn, loss_scale="dynamc"),
            "'dynamc'",
            "'dynamic'",
        ),
        "the optimizer's text as loss scale": (
            lambda: value_and_grad(loss_fn, loss_scale="dynamic"),
            "'dynamic'",
            "mixed_precision",
            "loss_scale_of(opt_state)",
        ),
        "a loss scale of zero": (
            lambda: value_and_grad(loss_fn, loss_scale=0),
            "loss_scale",
            "positive",
            "0",
        ),
    },
}

NAMED = ("ScaledGradients",)  # by JAX or Python

SCALED = {
    ValueError: {
        "to optax.adam": (lambda: update(optax.adam(1e-3)), *NAMED),
        "to optax.apply_updates": (lambda: optax.apply_updates(P, scaled()), *NAMED),
        "inside of a tree": (
            lambda: stepped(grads={"w": scaled(), "b": P["b"]}),
            "tree of the params",
            "w/tree",
        ),
    },
    TypeError: {
        "times a number": (lambda: scaled() * 2, *NAMED),
        "an array times them": (lambda: jnp.ones(4) * scaled(), *NAMED),
        "one of them": (lambda: scaled()["w"], "['w']", "apply_gradients"),
        "in a loop": (lambda: list(scaled()), "[0]", "apply_gradients"),
        "mapped over": (
            lambda: jax.tree.map(lambda g: g * 2, scaled()),
            "multiply does not accept",
            "key",
        ),
        "unscaled by hand": (
            lambda: StaticLossScale(1024.0).unscale(scaled()),
            "loss_scale.unscale",
            "apply_gradients",
        ),
    },
    AttributeError: {
        "an attribute": (lambda: scaled().items(), "'items'", *NAMED),
    },
}

# --- the step -------------------------------------------------------------------------------------

_ORDER = ("tx", "params", "state", "grads")


def swapped(order: tuple[str, ...]) -> Any:
    def make() -> None:
        made = tx()
        given = {"tx": made, "params": P, "state": made.init(P), "grads": true()}
        apply_gradients(*(given[name] for name in order))

    return make


ORDERS = {
    TypeError: {
        f"apply_gradients({', '.join(order)})": (
            swapped(order),
            "apply_gradients(tx, params, opt_state, grads)",
        )
        for order in itertools.permutations(_ORDER)
        if order != _ORDER
    }
}

STEPS = {
    TypeError: {
        "a plain optimizer": (
            lambda: apply_gradients(optax.adam(1e-3), P, None, P),
            "tx should",
            "outermost",
        ),
        "a plain optimizer's state": (
            lambda: stepped(state=optax.adam(1e-3).init(P)),
            "tuple",
            "tx.init(params)",
        ),
        "a TrainState as state": (
            lambda: stepped(state=TrainState.create(apply_fn=loss_fn, params=P, tx=tx())),
            "TrainState",
            "its opt_state",
        ),
    },
    ValueError: {
        "the loss among the gradients": (
            lambda: stepped(grads=value_and_grad(loss_fn)(P)),
            "tuple instead of dict",
            "loss, grads =",
        ),
        "a gradient that is missing": (
            lambda: stepped(grads={"w": P["w"]}),
            "tree of the params",
            "Missing: b",
        ),
        "a gradient of another shape": (
            lambda: stepped(grads=P | {"b": jnp.ones(3)}),
            "b is float32[3]",
            "[4]",
        ),
        "a complex gradient": (
            lambda: stepped(grads=P | {"b": jnp.ones(4, complex)}),
            "b is complex64[4]",
            "complex params only",
        ),
        "an integer gradient": (
            lambda: stepped(grads=P | {"b": jnp.arange(4)}),
            "b is int32[4]",
            "floating",
        ),
        "params of another tree": (
            lambda: stepped(params={"params": P}, grads={"params": P}),
            "params/b",
            "tx.init(params)",
        ),
        "update without params": (
            lambda: tx().update(P, tx().init(P)),
            "params",
            "update(gradients, state, params)",
        ),
    },
    RuntimeError: {
        "donated buffers again": (donated, "Array has been deleted"),
    },
}

WRAPPER = {
    TypeError: {
        "tx and policy swapped": (
            lambda: mixed_precision(BF16, optax.adam(1e-3)),
            "tx",
            "str",
            "mixed_precision(optax.adamw(1e-3), 'mixed_bfloat16')",
        ),
        "a transform that is not made": (
            lambda: mixed_precision(optax.adam, BF16),
            "tx",
            "function",
            "optax.adamw(1e-3)",
        ),
        "a dtype as policy": (
            lambda: mixed_precision(optax.adam(1e-3), jnp.bfloat16),
            "bfloat16",
            BF16,
        ),
        "the class of a loss scale": (
            lambda: tx(loss_scale=DynamicLossScale),
            "DynamicLossScale",
            "an instance",
        ),
        "a seed for a key": (
            lambda: tx(master_weights="stochastic", key=0),
            "key",
            "int",
            "jax.random.key(0)",
        ),
        "resync swapped": (lambda: resync(tx().init(P), P), "dict", "resync(params, opt_state)"),
        "convert swapped": (
            lambda: convert(P, tx().init(P), to=tx()),
            "dict",
            "convert(opt_state, params, to=tx)",
        ),
        "wrapped inside": (
            lambda: mixed_precision(optax.chain(optax.clip(1.0), tx()), BF16).init(P),
            "mixed_precision",
            "inside optax's chain",
            "outermost",
        ),
    },
    ValueError: {
        "wrapped twice": (
            lambda: mixed_precision(tx(), BF16),
            "mixed_precision already",
            "wrap it only once",
        ),
        "loss_scale misspelt": (
            lambda: tx(loss_scale="dynamc"),
            "loss_scale",
            "'dynamc'",
            "'dynamic'",
        ),
        "a text in a loss scale": (
            lambda: StaticLossScale("dynamic"),
            "could not convert string to float",
            "'dynamic'",
        ),
        "a period of 0": (lambda: DynamicLossScale(period=0), "period", "from 1 to", "0"),
        "a factor of 1": (lambda: DynamicLossScale(factor=1), "factor", "above 1", "1"),
        "a dtype for masters": (
            lambda: tx(master_weights="float32"),
            "master_weights",
            "'float32'",
            "'full'",
        ),
        "chance without a key": (
            lambda: tx(master_weights="stochastic"),
            "'stochastic'",
            "key=jax.random",
        ),
        "a key for nothing": (lambda: tx(key=KEY), "key", "'auto'", "leave key out"),
        "remainders of float16": (
            lambda: mixed_precision(
                optax.adam(1e-3), "float16", loss_scale=2.0, master_weights="remainder"
            ).init(HALF),
            "'remainder'",
            "float16",
            "'auto'",
        ),
        "a policy for moments": (
            lambda: tx(moment_dtype=BF16),
            "moment_dtype",
            f"'{BF16}'",
            "bfloat16",
        ),
        "a moment misspelt": (
            lambda: tx(moment_dtype={"nue": "bf16"}).init(P),
            "'nue'",
            "count, mu, nu",
        ),
        "a moment that never decays": (
            lambda: tx(moment_dtype={"nu": "bf16"}).init(P),
            "'nu'",
            "0.999",
            "key=",
        ),
        "a clip of 0": (lambda: tx(clip_global_norm=0), "clip_global_norm", "positive", "0"),
        "a dynamic scale that never looks": (
            lambda: tx(loss_scale="dynamic", skip_nonfinite=False),
            "skip_nonfinite=False",
            "leave skip_nonfinite=True",
        ),
        "an integer param": (
            lambda: tx().init({"n": jnp.arange(3)}),
            "n is int32",
            "Keep integers out",
        ),
        "8-bit params": (
            lambda: tx().init({"w": jnp.ones(3, jnp.float8_e4m3fn)}),
            "w is float8",
            "16 bits",
        ),
        "NumPy's float64": (
            lambda: tx().init({"w": np.ones(3)}),
            "w is NumPy's float64",
            "cast_floating(",
            "enable_x64",
        ),
        "shapes for params": (
            lambda: tx().init(jax.eval_shape(lambda: P)),
            "b is float32[4] of type ShapeDtypeStruct",
            "eval_shape(tx.init",
        ),
        "the scale of a plain state": (
            lambda: loss_scale_of(optax.adam(1e-3).init(P)),
            "opt_state",
            "mixed_precision(tx",
        ),
        "the scale of a transform": (
            lambda: loss_scale_of(tx(loss_scale=2.0)),
            "MixedPrecision",
            ".init(params)",
        ),
        "master_params swapped": (
            lambda: master_params(tx().init(P), P),
            "MixedPrecisionState",
            "master_params(params, opt_state)",
        ),
        "match_updates misspelt": (
            lambda: match_updates(optax.adam(1e-3), to="param"),
            "'param'",
            "'grads', 'params'",
        ),
    },
    UserWarning: {
        "no params": (lambda: tx().init({}), "without any array", "variables['params']"),
        "running statistics as params": (
            lambda: tx().init({"params": P, "batch_stats": {"mean": jnp.zeros(4)}}),
            "'batch_stats'",
            "tx.init(variables['params'])",
        ),
    },
    AssertionError: {
        "select_tree swapped": (
            lambda: select_tree(P, P, True),
            "dict",
            "select_tree(finite, new, old)",
        ),
    },
}

# --- microbatches and devices ---------------------------------------------------------------------

DEVICES = {
    ValueError: {
        "a batch that can't be split": (
            lambda: split_batch(jnp.ones((10, 4)), 3),
            "multiple of 3",
            "10",
        ),
        "split_batch swapped": (lambda: split_batch(2, X), "count", "split_batch(batch, count)"),
        "a scalar in the batch": (
            lambda: split_batch({"n": jnp.float32(1)}, 2),
            "n ()",
            "share their first axis",
        ),
        "labels of another length": (
            lambda: split_batch({"x": X, "y": jnp.ones(4)}, 2),
            "x (2, 4)",
            "y (4,)",
        ),
        "no batch": (
            lambda: accumulate_gradients(value_and_grad(loss_fn), P, {}),
            "microbatches",
            "split_batch(batch",
        ),
        "all_reduce outside of shard_map": (
            lambda: all_reduce(P, "data", "bf16"),
            "'data'",
            "jax.shard_map",
        ),
        "an axis misspelt": (
            lambda: jax.vmap(lambda p: vary(p, "dat", "bf16"), axis_name="data")(P),
            "'dat'",
            "shard_map",
        ),
        "a policy for a sum": (
            lambda: jax.vmap(lambda p: all_reduce(p, "i", BF16), axis_name="i")(P),
            f"'{BF16}'",
            "bf16,",
        ),
        "sums in integers": (
            lambda: jax.vmap(lambda p: all_reduce(p, "i", jnp.int8), axis_name="i")(P),
            "int8",
            "floating",
        ),
        "params that lie nowhere": (
            lambda: state_shardings(tx(), {"w": np.ones(3)}),
            "w has None",
            "device_put",
        ),
        "a stage misspelt": (
            lambda: collectives_of(loss_fn, P, stage="trace"),
            "'trace'",
            "'traced'",
        ),
    },
    TypeError: {
        "a loss instead of its gradients": (
            lambda: accumulate_gradients(loss_fn, P, split_batch(X, 2)),
            "value_and_grad_fn",
            "value_and_grad(loss_fn)",
        ),
        "the gradients' function second": (
            lambda: accumulate_gradients(P, value_and_grad(loss_fn), split_batch(X, 2)),
            "accumulate_gradients",
            "a function",
            "dict",
        ),
        "state_shardings swapped": (
            lambda: state_shardings(P, tx()),
            "dict",
            "state_shardings(tx, params)",
        ),
        "the result of a step": (
            lambda: collectives_of(loss_fn(P)),
            "collectives_of",
            "a function",
        ),
    },
}
