"""Mistakes in modules, in both wings."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import flax.linen
import flax.nnx
import jax.numpy as jnp

from mpmodules import linen as nn
from mpmodules import nnx, use_policy
from policy import DtypePolicyWarning
from tests.mistakes.common import KEY, X


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(x)


class XNet(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(x)


class Plain(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(4)(x)


def linen_keeping(keep: Any) -> None:
    class Timed(nn.Module):
        keep_inputs = keep

        @nn.compact
        def __call__(self, x, time):
            return nn.Dense(4)(x) + time

    Timed(dtype_policy="bf16")


def linen_keeping_params(keep: Any) -> None:
    class Scaled(nn.Module):
        keep_params = keep

        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, (1, 4))

    Scaled(dtype_policy="bf16").init(KEY, X)


def nnx_keeping_params(keep: Any) -> None:
    class Scaled(nnx.Module):
        keep_params = keep

        def __init__(self):
            self.scale = nnx.Param(jnp.ones((1, 4)))

    Scaled(dtype_policy="bf16")


def nnx_keeping(keep: Any) -> None:
    class Timed(nnx.Module):
        keep_inputs = keep

        def __call__(self, x, time):
            return x + time

    Timed(dtype_policy="bf16")


def rngs() -> Any:
    return nnx.Rngs(0)


def scope_around_a_built_model() -> None:
    model = XNet(rngs())
    with use_policy("mixed_bfloat16"):
        model(X)


def path_rules_while_building() -> None:
    with use_policy("mixed_bfloat16", rules={"head": "f32"}):
        XNet(rngs())


def child_from_outside() -> None:
    nnx.Sequential(nnx.Linear(4, 4, rngs=rngs()), dtype_policy="bf16")


def policy_set_on_a_built_model() -> None:
    model = XNet(rngs())
    model.dtype_policy = "bf16"
    model(X)


def policy_set_in_the_constructor() -> None:
    class Late(nnx.Module):
        def __init__(self, rngs):
            self.dtype_policy = "bf16"
            self.head = nnx.Linear(4, 4, rngs=rngs)

    Late(rngs())


def dtype_against_the_policy(build: Any) -> Any:
    def make() -> None:
        with use_policy("mixed_bfloat16"):
            build()

    return make


TEXT = "mixed_bfloat16"
WAY_OUT = f"dtype_policy='{TEXT}'"
AT_ARGUMENTS = ("dtype=float32", "Delete the argument", "dtype_policy")

LINEN = {
    TypeError: {
        "a policy as dtype": (lambda: nn.Dense(4, dtype=TEXT), f"Dense(dtype='{TEXT}')", WAY_OUT),
        "a short dtype": (
            lambda: nn.LayerNorm(dtype="bf16"),
            "dtype='bf16'",
            "jnp.bfloat16",
            "policy=",
        ),
        "policy=": (lambda: nn.Dense(4, policy=TEXT), "'policy'", f"Dense(..., {WAY_OUT})"),
        "dtype_policy misspelt": (
            lambda: nn.GRUCell(4, dtype_polcy="bf16"),
            "polcy",
            "dtype_policy='bf16'",
        ),
        "dtype= of one's own": (lambda: Net(dtype=TEXT), "'dtype'", f"Net(..., {WAY_OUT})"),
        "a policy by position": (lambda: Net(TEXT), "positional", f"Net(..., {WAY_OUT})"),
        "a dtype as policy": (
            lambda: nn.Dense(4, dtype_policy=jnp.bfloat16),
            "Dense(dtype_policy=",
            TEXT,
        ),
        "keep_inputs as an argument": (
            lambda: Net(keep_inputs=("x",)),
            "keep_inputs",
            "class attribute",
        ),
        "keep_inputs as one text": (
            lambda: linen_keeping("time"),
            "Timed.keep_inputs",
            "('time',)",
        ),
        "keep_params as one text": (lambda: linen_keeping_params("scale"), "Scaled.keep_params"),
        "keep_params as an argument": (
            lambda: Net(keep_params=("x",)),
            "keep_params",
            "class attribute",
        ),
        "a port of a class": (
            lambda: nn.apply_policy(Plain, "bf16"),
            "class Plain",
            "make an instance",
        ),
        "a port swapped": (
            lambda: nn.apply_policy("bf16", Plain()),
            "'bf16'",
            "apply_policy(model, policy)",
        ),
        "a port of apply": (
            lambda: nn.apply_policy(Plain().apply, "bf16"),
            "Module.apply",
            "(model, ",
        ),
        "a port of the other wing": (
            lambda: nn.apply_policy(XNet(rngs()), "bf16"),
            "XNet",
            "nnx.apply_p",
        ),
        "a port without a policy": (lambda: nn.apply_policy(Plain(), None), "None", TEXT),
    },
    ValueError: {
        "keep_inputs misspelt": (lambda: linen_keeping(("tiem",)), "'tiem'", "take time, x"),
        "8 bits under a policy": (
            dtype_against_the_policy(lambda: nn.Dense(4, dtype=jnp.float8_e4m3fn).init(KEY, X)),
            "Dense",
            "dtype=float8_e4m3fn",
            "m=f8",
        ),
        "float64 without x64": (
            lambda: Net(dtype_policy="f64").init(KEY, X),
            "float64",
            "jax_enable_x64",
        ),
        "a port's rule that matches nothing": (
            lambda: nn.apply_policy(Plain(), "bf16", {"haed": "f32"}).init(KEY, X),
            "'haed'",
            "seen: Dense_0",
        ),
        "a port's option misspelt": (
            lambda: nn.apply_policy(Plain(), "bf16", own_code="skip"),
            "own_code",
            "'skip'",
            "'autocast', 'keep'",
        ),
    },
    DtypePolicyWarning: {
        "keep_params misspelt": (
            lambda: linen_keeping_params(("scael",)),
            "Scaled.keep_params",
            "scael",
            "It has: scale",
        ),
        "dtype against the policy": (
            dtype_against_the_policy(lambda: nn.Dense(4, dtype=jnp.float32).init(KEY, X)),
            *AT_ARGUMENTS,
        ),
        "dtype beside dtype_policy": (
            lambda: nn.Dense(4, dtype=jnp.float16, dtype_policy="bf16").init(KEY, X),
            "dtype=float16",
            "bfloat16",
            "Delete the argument",
        ),
    },
}

NNX = {
    TypeError: {
        "a policy as dtype": (
            lambda: nnx.Linear(4, 4, dtype=TEXT, rngs=rngs()),
            "dtype='mixed",
            WAY_OUT,
        ),
        "a policy as param_dtype": (
            lambda: nnx.Embed(4, 4, param_dtype=TEXT, rngs=rngs()),
            f"Embed(param_dtype='{TEXT}')",
            WAY_OUT,
        ),
        "a short dtype": (
            lambda: nnx.LayerNorm(4, dtype="bf16", rngs=rngs()),
            "'bf16'",
            "jnp.bfloat16",
        ),
        "policy=": (
            lambda: nnx.Linear(4, 4, policy=TEXT, rngs=rngs()),
            "'policy'",
            f"Linear(..., {WAY_OUT})",
        ),
        "dtype_policy misspelt": (
            lambda: XNet(rngs(), dtype_polcy="bf16"),
            "polcy",
            "dtype_policy='bf16'",
        ),
        "policy= of one's own": (
            lambda: XNet(rngs(), policy=TEXT),
            "'policy'",
            f"XNet(..., {WAY_OUT})",
        ),
        "a policy by position": (lambda: XNet(rngs(), TEXT), "positional", f"XNet(..., {WAY_OUT})"),
        "keep_inputs as one text": (lambda: nnx_keeping("time"), "Timed.keep_inputs", "('time',)"),
        "keep_params as one text": (
            lambda: nnx_keeping_params("scale"),
            "Scaled.keep_params",
            "tuple",
        ),
        "a port of a class": (
            lambda: nnx.apply_policy(XNet, "bf16"),
            "class XNet",
            "make an instance",
        ),
        "a port swapped": (
            lambda: nnx.apply_policy("bf16", XNet(rngs())),
            "'bf16'",
            "(model, policy)",
        ),
        "a port of a state": (
            lambda: nnx.apply_policy(flax.nnx.state(XNet(rngs())), "bf16"),
            "State",
            "(model, ",
        ),
        "a port of the other wing": (
            lambda: nnx.apply_policy(Plain(), "bf16"),
            "Plain",
            "linen.apply_p",
        ),
    },
    ValueError: {
        "keep_inputs misspelt": (lambda: nnx_keeping(("tiem",)), "'tiem'", "take time, x"),
        "path rules while building": (
            path_rules_while_building,
            "XNet",
            "Build the model first",
            "apply_policy(",
        ),
        "a child from outside": (child_from_outside, "Sequential(", "Linear", "Build them inside"),
        "a policy set on a model": (policy_set_on_a_built_model, "XNet", "'bf16'", "apply_policy("),
        "a policy set in __init__": (
            policy_set_in_the_constructor,
            "Late",
            "'bf16'",
            "dtype_policy='bf16'",
        ),
        "a port's rule that matches nothing": (
            lambda: nnx.apply_policy(XNet(rngs()), "bf16", {"haed": "f32"}),
            "'haed'",
            "seen: head",
        ),
        "a linen class in a rule": (
            lambda: nnx.apply_policy(XNet(rngs()), "bf16", {nn.Dense: "f32"}),
            "Dense",
            "seen: head",
        ),
        "an average of half-precision params": (
            lambda: nnx.EMA(flax.nnx.state(XNet(rngs(), dtype_policy="bf16"), nnx.Param), 0.99),
            "head/kernel is bfloat16",
            "master_params(",
        ),
    },
    DtypePolicyWarning: {
        "keep_params misspelt": (
            lambda: nnx_keeping_params(("scael",)),
            "Scaled.keep_params",
            "scael",
            "It has: scale",
        ),
        "dtype against the policy": (
            dtype_against_the_policy(lambda: nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs())),
            *AT_ARGUMENTS,
        ),
        "a scope around a call": (
            scope_around_a_built_model,
            "XNet",
            "build the model in",
            "apply_policy(",
        ),
    },
}
