"""Mistakes with whole functions: autocast, audit, compare, suggest, the assertions and losses."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpmodules import linen as nn
from mpmodules import nnx
from policy import (
    DtypePolicyWarning,
    audit,
    autocast,
    compare,
    full_precision,
    losses,
    mixed_precision,
    suggest,
)
from policy.testing import assert_close_in_ulps, assert_dots_in
from tests.mistakes.layers import Net, X, XNet, rngs
from tests.mistakes.training import P, loss_fn

BF16 = "mixed_bfloat16"


def step_under_autocast(tx: Any) -> None:
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    autocast(step, BF16)(P, tx.init(P))


def nnx_step_under_autocast() -> None:
    model = XNet(rngs())
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: model(X).sum())(model))

    autocast(step, BF16)(model, optimizer)


AUTOCAST = {
    TypeError: {
        "autocast … a function … Array(": lambda: autocast(loss_fn(P), BF16),
        "autocast … Net … model.apply": lambda: autocast(Net(), BF16),
        "autocast … XNet … an instance": lambda: autocast(XNet, BF16),
        f"loss_fn … '{BF16}'": lambda: autocast(BF16, loss_fn),
        "deny … ('tanh',)": lambda: autocast(loss_fn, BF16, deny="tanh"),
        "params … positions or names": lambda: autocast(loss_fn, BF16, params=P),
        "Dense … a path pattern": lambda: autocast(loss_fn, BF16, rules={nn.Dense: "f32"}),
        "normalizes … 'norm' … collection": lambda: autocast(loss_fn, BF16, normalizes="norm"),
        "enabled … 'no' … True or False": lambda: autocast(loss_fn, BF16, enabled="no"),
        "full_precision … a function": lambda: full_precision(loss_fn(P)),
    },
    DtypePolicyWarning: {
        f"autocast(loss_fn) … '{BF16}' … use_policy": lambda: autocast(loss_fn)(P),
        "TraceState … to the loss function only": lambda: step_under_autocast(optax.sgd(1e-3, 0.9)),
        "MixedPrecisionState … to the loss function only": lambda: step_under_autocast(
            mixed_precision(optax.sgd(1e-3), "float32")
        ),
        "Optimizer … to the loss function only": nnx_step_under_autocast,
    },
    ValueError: {
        "'dot' … allow … Nearest": lambda: autocast(loss_fn, BF16, allow=["dot"]),
        "'exp' … allow, deny": lambda: autocast(loss_fn, BF16, allow=["exp"], deny=["exp"]),
        "preset … 'O1' … 'memory'": lambda: autocast(loss_fn, BF16, preset="O1"),
        "'weights' … params, x": lambda: autocast(loss_fn, BF16, params="weights")(P),
        "'haed' … Modules seen": lambda: autocast(loss_fn, BF16, rules={"haed": "f32"})(P),
    },
}

SHAPES = jax.eval_shape(lambda: P)

INSPECTION = {
    TypeError: {
        "audit … a function or a module … Array(": lambda: audit(loss_fn(P)),
        "audit … Net … model.apply": lambda: audit(Net(), X),
        "is a shape … give an array": lambda: compare(loss_fn, SHAPES, policy=BF16),
        "float32[4] … backward=True": lambda: compare(
            lambda p: p["b"], P, policy=BF16, backward=True
        ),
        "beside= … a policy, a function or (function, *args) … dict": lambda: compare(
            loss_fn, P, beside={"other": loss_fn}
        ),
        "beside= … (function, *args) … tuple": lambda: compare(loss_fn, P, beside=()),
        "beside= … the class Net … an instance": lambda: compare(loss_fn, P, beside=Net),
        "args … tuple … a dict": lambda: assert_dots_in(loss_fn, P, "bf16"),
        "dtype … 'fp16' … 'bf16'": lambda: assert_dots_in(loss_fn, (P,), "fp16"),
    },
    ValueError: {
        "backward=True … floating": lambda: audit(lambda n: n * 2.0, jnp.arange(3), backward=True),
        "'fp16' … f16": lambda: compare(loss_fn, P, policy="fp16"),
        "'fp8' … mixed_float8": lambda: compare(loss_fn, P, beside="fp8"),
        f"policy='{BF16}' … loss_fn … Leave policy= out … use_policy": lambda: compare(
            loss_fn, P, policy=BF16, beside=loss_fn
        ),
        "output (result) is [] of loss_fn and none of <lambda> … log-probs": lambda: compare(
            loss_fn, P, beside=lambda p: (loss_fn(p), p)
        ),
        "output b is [4] of <lambda> and [2, 4] … one shape": lambda: compare(
            lambda p: p, P, beside=lambda p: {**p, "b": X}
        ),
        "gradient b … none": lambda: compare(
            loss_fn, P, backward=True, beside=(lambda x: x.sum(), X)
        ),
        "budget … error=0.02 … on='v5e:1x1'": lambda: suggest(loss_fn, P, policy=BF16),
        "error … '1%' … number": lambda: suggest(loss_fn, P, policy=BF16, error="1%"),
        f"policy='{BF16}' … half": lambda: suggest(loss_fn, P, error=0.1),
        "(3,) … (2, 4)": lambda: assert_close_in_ulps(X, jnp.ones(3), 1),
    },
    AssertionError: {"no matmul … nothing": lambda: assert_dots_in(jnp.tanh, (X,), "bf16")},
}

LOSSES = {
    ValueError: {
        "labels … float32 … softmax_cross_entropy takes dense": lambda: (
            losses.softmax_cross_entropy_with_integer_labels(X, jnp.ones((2, 4)))
        ),
        "labels … int32 … softmax_cross_entropy_with_integer_labels": lambda: (
            losses.softmax_cross_entropy(jnp.ones((4, 4)), jnp.arange(4))
        ),
        "labels … (2, 1) … (2,)": lambda: losses.softmax_cross_entropy_with_integer_labels(
            X, jnp.zeros((2, 1), int)
        ),
        "labels … (3,) … (2,)": lambda: losses.softmax_cross_entropy_with_integer_labels(
            X, jnp.zeros(3, int)
        ),
    }
}
