"""Mistakes with whole functions: autocast, audit, compare, suggest, the assertions, losses, and the
command line.
"""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpmodules import linen as nn
from mpmodules import nnx
from policy import DtypePolicyWarning, audit, autocast, compare, full_precision, losses, suggest
from policy.command_line.command import main
from policy.testing import assert_close_in_ulps, assert_dots_in
from tests.mistakes.common import X
from tests.mistakes.layers import Net, XNet, rngs
from tests.mistakes.training import P, loss_fn

BF16 = "mixed_bfloat16"


class CommandFailed(Exception):
    """The command line printed an error."""


def command(*arguments: str) -> None:
    """Runs ``python -m policy``; raises what it prints to its standard error."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    if status:
        raise CommandFailed(printed.getvalue())


def step_under_autocast() -> None:
    tx = optax.sgd(1e-3, 0.9)

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
        "a value": (lambda: autocast(loss_fn(P), BF16), "autocast", "a function", "Array("),
        "a linen model": (lambda: autocast(Net(), BF16), "autocast", "Net", "model.apply"),
        "a class": (lambda: autocast(XNet, BF16), "autocast", "XNet", "an instance"),
        "policy and function swapped": (lambda: autocast(BF16, loss_fn), "loss_fn", f"'{BF16}'"),
        "one name for a list": (lambda: autocast(loss_fn, BF16, deny="tanh"), "deny", "('tanh',)"),
        "params themselves": (
            lambda: autocast(loss_fn, BF16, params=P),
            "params",
            "positions or names",
        ),
        "a rule by class": (
            lambda: autocast(loss_fn, BF16, rules={nn.Dense: "f32"}),
            "Dense",
            "a path pattern",
        ),
        "normalises as one text": (
            lambda: autocast(loss_fn, BF16, normalises="norm"),
            "normalises",
            "'norm'",
            "collection",
        ),
        "enabled as a text": (
            lambda: autocast(loss_fn, BF16, enabled="no"),
            "enabled",
            "'no'",
            "True or False",
        ),
        "an island of a value": (
            lambda: full_precision(loss_fn(P)),
            "full_precision",
            "a function",
        ),
    },
    DtypePolicyWarning: {
        "no policy at all": (
            lambda: autocast(loss_fn)(P),
            "autocast(loss_fn)",
            f"'{BF16}'",
            "use_policy",
        ),
        "an optimizer inside": (step_under_autocast, "TraceState", "to the loss function only"),
        "an nnx optimizer inside": (
            nnx_step_under_autocast,
            "Optimizer",
            "to the loss function only",
        ),
    },
    ValueError: {
        "an unknown primitive": (
            lambda: autocast(loss_fn, BF16, allow=["dot"]),
            "'dot'",
            "allow",
            "Nearest",
        ),
        "allowed and denied": (
            lambda: autocast(loss_fn, BF16, allow=["exp"], deny=["exp"]),
            "'exp'",
            "allow, deny",
        ),
        "a preset of another library": (
            lambda: autocast(loss_fn, BF16, preset="O1"),
            "preset",
            "'O1'",
            "'memory'",
        ),
        "params misspelt": (
            lambda: autocast(loss_fn, BF16, params="weights")(P),
            "'weights'",
            "params, x",
        ),
        "a rule that matches nothing": (
            lambda: autocast(loss_fn, BF16, rules={"haed": "f32"})(P),
            "'haed'",
            "Modules seen",
        ),
    },
}

SHAPES = jax.eval_shape(lambda: P)

INSPECTION = {
    TypeError: {
        "an audit of a value": (
            lambda: audit(loss_fn(P)),
            "audit",
            "a function or a module",
            "Array(",
        ),
        "an audit of a linen model": (lambda: audit(Net(), X), "audit", "Net", "model.apply"),
        "a comparison of shapes": (
            lambda: compare(loss_fn, SHAPES, policy=BF16),
            "is a shape",
            "give an array",
        ),
        "gradients of a vector": (
            lambda: compare(lambda p: p["b"], P, policy=BF16, backward=True),
            "float32[4]",
            "backward=True",
        ),
        "one argument for a tuple": (
            lambda: assert_dots_in(loss_fn, P, "bf16"),
            "args",
            "tuple",
            "a dict",
        ),
        "torch's name of a dtype": (
            lambda: assert_dots_in(loss_fn, (P,), "fp16"),
            "dtype",
            "'fp16'",
            "'bf16'",
        ),
    },
    ValueError: {
        "gradients by integers": (
            lambda: audit(lambda n: n * 2.0, jnp.arange(3), backward=True),
            "backward=True",
            "floating",
        ),
        "a report as text": (
            lambda: audit(loss_fn, P).save("audit.txt"),
            "'audit.txt'",
            ".html or .json",
        ),
        "a policy misspelt": (lambda: compare(loss_fn, P, policy="fp16"), "'fp16'", "f16"),
        "suggest without a budget": (
            lambda: suggest(loss_fn, P, policy=BF16),
            "budget",
            "error=0.02",
            "on='v5e:1x1'",
        ),
        "a budget in percent": (
            lambda: suggest(loss_fn, P, policy=BF16, error="1%"),
            "error",
            "'1%'",
            "number",
        ),
        "suggest without a policy": (
            lambda: suggest(loss_fn, P, error=0.1),
            f"policy='{BF16}'",
            "half",
        ),
        "arrays of two shapes": (lambda: assert_close_in_ulps(X, jnp.ones(3), 1), "(3,)", "(2, 4)"),
    },
    AssertionError: {
        "nothing to assert about": (
            lambda: assert_dots_in(jnp.tanh, (X,), "bf16"),
            "no matmul",
            "nothing",
        ),
    },
}

LOSSES = {
    ValueError: {
        "one-hot labels for integers": (
            lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.ones((2, 4))),
            "labels",
            "float32",
            "softmax_cross_entropy takes dense",
        ),
        "integers for one-hot labels": (
            lambda: losses.softmax_cross_entropy(jnp.ones((4, 4)), jnp.arange(4)),
            "labels",
            "int32",
            "softmax_cross_entropy_with_integer_labels",
        ),
        "a column of labels": (
            lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.zeros((2, 1), int)),
            "labels",
            "(2, 1)",
            "(2,)",
        ),
        "labels of another batch": (
            lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.zeros(3, int)),
            "labels",
            "(3,)",
            "(2,)",
        ),
    },
}

HERE = "tests.mistakes.training"
ARG = ("--arg", "{'w': f32[4,4], 'b': f32[4]}")

COMMANDS = {
    CommandFailed: {
        "no function": (lambda: command("audit", HERE), HERE, ":"),
        "a function misspelt": (
            lambda: command("audit", f"{HERE}:loss_fm", *ARG),
            "loss_fm",
            "loss_fn",
        ),
        "a file that is not there": (lambda: command("audit", "trian.py:loss_fn"), "trian.py"),
        "a shape misspelt": (
            lambda: command("audit", f"{HERE}:loss_fn", "--arg", "f32[4,x]"),
            "f32[4,x]",
            "bf16[8,128]",
        ),
        "an argument unquoted": (
            lambda: command("audit", f"{HERE}:loss_fn", "--arg", "{w:"),
            "{w:",
            "bf16[8,128]",
        ),
        "too few arguments": (
            lambda: command("audit", f"{HERE}:scaled", "--arg", "f32[4]"),
            "scaled",
            "argument",
        ),
        "a kind misspelt": (
            lambda: command("audit", f"{HERE}:loss_fn", *ARG, "--ignore", "float32-matmull"),
            "matmull",
            "float32-matmul",
        ),
        "params without backward": (
            lambda: command("audit", f"{HERE}:loss_fn", *ARG, "--params", "0"),
            "--params",
            "--backward",
        ),
        "a command misspelt": (lambda: command("adit", f"{HERE}:loss_fn"), "'adit'", "audit"),
    },
}
