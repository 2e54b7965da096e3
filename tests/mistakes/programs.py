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
from tests.mistakes.layers import Net, XNet, rngs
from tests.mistakes.table import Mistake, X
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


AUTOCAST = [
    Mistake(
        "a value",
        lambda: autocast(loss_fn(P), BF16),
        TypeError,
        ("autocast", "a function", "Array("),
    ),
    Mistake(
        "a linen model",
        lambda: autocast(Net(), BF16),
        TypeError,
        ("autocast", "Net", "model.apply"),
    ),
    Mistake(
        "a class", lambda: autocast(XNet, BF16), TypeError, ("autocast", "XNet", "an instance")
    ),
    Mistake(
        "policy and function swapped",
        lambda: autocast(BF16, loss_fn),
        TypeError,
        ("loss_fn", f"'{BF16}'"),
    ),
    Mistake(
        "a dtype for a policy",
        lambda: autocast(loss_fn, jnp.bfloat16),
        TypeError,
        ("bfloat16", f"'{BF16}'"),
    ),
    Mistake(
        "no policy at all",
        lambda: autocast(loss_fn)(P),
        DtypePolicyWarning,
        ("autocast(loss_fn)", f"'{BF16}'", "use_policy"),
    ),
    Mistake(
        "an unknown primitive",
        lambda: autocast(loss_fn, BF16, allow=["dot"]),
        ValueError,
        ("'dot'", "allow", "Nearest"),
    ),
    Mistake(
        "one name for a list",
        lambda: autocast(loss_fn, BF16, deny="tanh"),
        TypeError,
        ("deny", "('tanh',)"),
    ),
    Mistake(
        "functions for names",
        lambda: autocast(loss_fn, BF16, deny=[jnp.exp]),
        TypeError,
        ("deny", "names of primitives", "exp"),
    ),
    Mistake(
        "allowed and denied",
        lambda: autocast(loss_fn, BF16, allow=["exp"], deny=["exp"]),
        ValueError,
        ("'exp'", "allow, deny"),
    ),
    Mistake(
        "a preset of another library",
        lambda: autocast(loss_fn, BF16, preset="O1"),
        ValueError,
        ("preset", "'O1'", "'memory'"),
    ),
    Mistake(
        "params misspelt",
        lambda: autocast(loss_fn, BF16, params="weights")(P),
        ValueError,
        ("'weights'", "params, x"),
    ),
    Mistake(
        "params themselves",
        lambda: autocast(loss_fn, BF16, params=P),
        TypeError,
        ("params", "positions or names"),
    ),
    Mistake(
        "a rule that matches nothing",
        lambda: autocast(loss_fn, BF16, rules={"haed": "f32"})(P),
        ValueError,
        ("'haed'", "Modules seen"),
    ),
    Mistake(
        "a rule by class",
        lambda: autocast(loss_fn, BF16, rules={nn.Dense: "f32"}),
        TypeError,
        ("Dense", "a path pattern"),
    ),
    Mistake(
        "normalises as one text",
        lambda: autocast(loss_fn, BF16, normalises="norm"),
        TypeError,
        ("normalises", "'norm'", "collection"),
    ),
    Mistake(
        "enabled as a text",
        lambda: autocast(loss_fn, BF16, enabled="no"),
        TypeError,
        ("enabled", "'no'", "True or False"),
    ),
    Mistake(
        "an optimizer inside",
        step_under_autocast,
        DtypePolicyWarning,
        ("TraceState", "to the loss function only"),
    ),
    Mistake(
        "an nnx optimizer inside",
        nnx_step_under_autocast,
        DtypePolicyWarning,
        ("Optimizer", "to the loss function only"),
    ),
    Mistake(
        "an island of a value",
        lambda: full_precision(loss_fn(P)),
        TypeError,
        ("full_precision", "a function"),
    ),
]

SHAPES = jax.eval_shape(lambda: P)

INSPECTION = [
    Mistake(
        "an audit of a value",
        lambda: audit(loss_fn(P)),
        TypeError,
        ("audit", "a function or a module", "Array("),
    ),
    Mistake(
        "an audit of a linen model",
        lambda: audit(Net(), X),
        TypeError,
        ("audit", "Net", "model.apply"),
    ),
    Mistake(
        "an audit of a jaxpr",
        lambda: audit(jax.make_jaxpr(loss_fn)(P)),
        TypeError,
        ("audit", "a function", "Jaxpr"),
    ),
    Mistake(
        "gradients by integers",
        lambda: audit(lambda n: n * 2.0, jnp.arange(3), backward=True),
        ValueError,
        ("backward=True", "floating"),
    ),
    Mistake(
        "a report as text",
        lambda: audit(loss_fn, P).save("audit.txt"),
        ValueError,
        ("'audit.txt'", ".html or .json"),
    ),
    Mistake(
        "a comparison of shapes",
        lambda: compare(loss_fn, SHAPES, policy=BF16),
        TypeError,
        ("is a shape", "give an array"),
    ),
    Mistake(
        "a comparison of a linen model",
        lambda: compare(Net(), X, policy=BF16),
        TypeError,
        ("compare", "Net", "model.apply"),
    ),
    Mistake(
        "a policy misspelt",
        lambda: compare(loss_fn, P, policy="fp16"),
        ValueError,
        ("'fp16'", "f16"),
    ),
    Mistake(
        "gradients of a vector",
        lambda: compare(lambda p: p["b"], P, policy=BF16, backward=True),
        TypeError,
        ("float32[4]", "backward=True"),
    ),
    Mistake(
        "suggest without a budget",
        lambda: suggest(loss_fn, P, policy=BF16),
        ValueError,
        ("budget", "error=0.02", "on='v5e:1x1'"),
    ),
    Mistake(
        "a budget in percent",
        lambda: suggest(loss_fn, P, policy=BF16, error="1%"),
        ValueError,
        ("error", "'1%'", "number"),
    ),
    Mistake(
        "suggest without a policy",
        lambda: suggest(loss_fn, P, error=0.1),
        ValueError,
        (f"policy='{BF16}'", "half"),
    ),
    Mistake(
        "one argument for a tuple",
        lambda: assert_dots_in(loss_fn, P, "bf16"),
        TypeError,
        ("args", "tuple", "a dict"),
    ),
    Mistake(
        "torch's name of a dtype",
        lambda: assert_dots_in(loss_fn, (P,), "fp16"),
        TypeError,
        ("dtype", "'fp16'", "'bf16'"),
    ),
    Mistake(
        "nothing to assert about",
        lambda: assert_dots_in(jnp.tanh, (X,), "bf16"),
        AssertionError,
        ("no matmul", "nothing"),
    ),
    Mistake(
        "arrays of two shapes",
        lambda: assert_close_in_ulps(X, jnp.ones(3), 1),
        ValueError,
        ("(3,)", "(2, 4)"),
    ),
]

LOSSES = [
    Mistake(
        "one-hot labels for integers",
        lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.ones((2, 4))),
        ValueError,
        ("labels", "float32", "softmax_cross_entropy takes dense"),
    ),
    Mistake(
        "integers for one-hot labels",
        lambda: losses.softmax_cross_entropy(jnp.ones((4, 4)), jnp.arange(4)),
        ValueError,
        ("labels", "int32", "softmax_cross_entropy_with_integer_labels"),
    ),
    Mistake(
        "a column of labels",
        lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.zeros((2, 1), int)),
        ValueError,
        ("labels", "(2, 1)", "(2,)"),
    ),
    Mistake(
        "labels of another batch",
        lambda: losses.softmax_cross_entropy_with_integer_labels(X, jnp.zeros(3, int)),
        ValueError,
        ("labels", "(3,)", "(2,)"),
    ),
]

HERE = "tests.mistakes.training"
ARG = ("--arg", "{'w': f32[4,4], 'b': f32[4]}")

COMMANDS = [
    Mistake("no function", lambda: command("audit", HERE), CommandFailed, (HERE, ":")),
    Mistake(
        "a function misspelt",
        lambda: command("audit", f"{HERE}:loss_fm", *ARG),
        CommandFailed,
        ("loss_fm", "loss_fn"),
    ),
    Mistake(
        "a file that is not there",
        lambda: command("audit", "trian.py:loss_fn"),
        CommandFailed,
        ("trian.py",),
    ),
    Mistake(
        "a shape misspelt",
        lambda: command("audit", f"{HERE}:loss_fn", "--arg", "f32[4,x]"),
        CommandFailed,
        ("f32[4,x]", "bf16[8,128]"),
    ),
    Mistake(
        "a dtype misspelt",
        lambda: command("audit", f"{HERE}:loss_fn", "--arg", "fp32[4]"),
        CommandFailed,
        ("'fp32'", "f32"),
    ),
    Mistake(
        "an argument unquoted",
        lambda: command("audit", f"{HERE}:loss_fn", "--arg", "{w:"),
        CommandFailed,
        ("{w:", "bf16[8,128]"),
    ),
    Mistake(
        "too few arguments",
        lambda: command("audit", f"{HERE}:scaled", "--arg", "f32[4]"),
        CommandFailed,
        ("scaled", "argument"),
    ),
    Mistake(
        "a kind misspelt",
        lambda: command("audit", f"{HERE}:loss_fn", *ARG, "--ignore", "float32-matmull"),
        CommandFailed,
        ("matmull", "float32-matmul"),
    ),
    Mistake(
        "params without backward",
        lambda: command("audit", f"{HERE}:loss_fn", *ARG, "--params", "0"),
        CommandFailed,
        ("--params", "--backward"),
    ),
    Mistake(
        "a command misspelt",
        lambda: command("adit", f"{HERE}:loss_fn"),
        CommandFailed,
        ("'adit'", "audit"),
    ),
]
