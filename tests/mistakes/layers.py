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
from policy import DtypePolicyWarning, get_policy
from tests.mistakes.table import KEY, Mistake, X


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

LINEN = [
    Mistake(
        "a policy as dtype",
        lambda: nn.Dense(4, dtype=TEXT),
        TypeError,
        (f"Dense(dtype='{TEXT}')", WAY_OUT),
    ),
    Mistake(
        "a policy as param_dtype",
        lambda: nn.Embed(4, 4, param_dtype=TEXT),
        TypeError,
        (f"Embed(param_dtype='{TEXT}')", WAY_OUT),
    ),
    Mistake(
        "a short dtype",
        lambda: nn.LayerNorm(dtype="bf16"),
        TypeError,
        ("dtype='bf16'", "jnp.bfloat16", "policy="),
    ),
    Mistake(
        "a Policy as dtype",
        lambda: nn.Conv(4, (3,), dtype=get_policy(TEXT)),
        TypeError,
        ("Conv(dtype=", "_policy="),
    ),
    Mistake(
        "no dtype at all",
        lambda: nn.Dense(4, dtype="fp16"),
        TypeError,
        ("dtype='fp16'", "jnp.bfloat16", "policy="),
    ),
    Mistake(
        "policy=",
        lambda: nn.Dense(4, policy=TEXT),
        TypeError,
        ("'policy'", f"Dense(..., {WAY_OUT})"),
    ),
    Mistake(
        "dtype_policy misspelt",
        lambda: nn.GRUCell(4, dtype_polcy="bf16"),
        TypeError,
        ("polcy", "dtype_policy='bf16'"),
    ),
    Mistake(
        "policy= of one's own",
        lambda: Net(policy=TEXT),
        TypeError,
        ("'policy'", f"Net(..., {WAY_OUT})"),
    ),
    Mistake(
        "dtype= of one's own",
        lambda: Net(dtype=TEXT),
        TypeError,
        ("'dtype'", f"Net(..., {WAY_OUT})"),
    ),
    Mistake(
        "a policy by position", lambda: Net(TEXT), TypeError, ("positional", f"Net(..., {WAY_OUT})")
    ),
    Mistake(
        "a dtype as policy",
        lambda: nn.Dense(4, dtype_policy=jnp.bfloat16),
        TypeError,
        ("Dense(dtype_policy=", TEXT),
    ),
    Mistake(
        "a dict as policy",
        lambda: Net(dtype_policy={"compute": "bf16"}),
        TypeError,
        ("Net(dtype_policy={", TEXT),
    ),
    Mistake(
        "keep_inputs as an argument",
        lambda: Net(keep_inputs=("x",)),
        TypeError,
        ("keep_inputs", "class attribute"),
    ),
    Mistake(
        "keep_inputs as one text",
        lambda: linen_keeping("time"),
        TypeError,
        ("Timed.keep_inputs", "('time',)"),
    ),
    Mistake(
        "keep_inputs misspelt",
        lambda: linen_keeping(("tiem",)),
        ValueError,
        ("'tiem'", "take time, x"),
    ),
    Mistake(
        "keep_params as one text",
        lambda: linen_keeping_params("scale"),
        TypeError,
        ("Scaled.keep_params",),
    ),
    Mistake(
        "keep_params misspelt",
        lambda: linen_keeping_params(("scael",)),
        DtypePolicyWarning,
        ("Scaled.keep_params", "scael", "It has: scale"),
    ),
    Mistake(
        "keep_params as an argument",
        lambda: Net(keep_params=("x",)),
        TypeError,
        ("keep_params", "class attribute"),
    ),
    Mistake(
        "dtype against the policy",
        dtype_against_the_policy(lambda: nn.Dense(4, dtype=jnp.float32).init(KEY, X)),
        DtypePolicyWarning,
        AT_ARGUMENTS,
    ),
    Mistake(
        "dtype beside dtype_policy",
        lambda: nn.Dense(4, dtype=jnp.float16, dtype_policy="bf16").init(KEY, X),
        DtypePolicyWarning,
        ("dtype=float16", "bfloat16", "Delete the argument"),
    ),
    Mistake(
        "8 bits under a policy",
        dtype_against_the_policy(lambda: nn.Dense(4, dtype=jnp.float8_e4m3fn).init(KEY, X)),
        ValueError,
        ("Dense", "dtype=float8_e4m3fn", "m=f8"),
    ),
    Mistake(
        "float64 without x64",
        lambda: Net(dtype_policy="f64").init(KEY, X),
        ValueError,
        ("float64", "jax_enable_x64"),
    ),
    Mistake(
        "a port of a class",
        lambda: nn.apply_policy(Plain, "bf16"),
        TypeError,
        ("class Plain", "make an instance"),
    ),
    Mistake(
        "a port swapped",
        lambda: nn.apply_policy("bf16", Plain()),
        TypeError,
        ("'bf16'", "apply_policy(model, policy)"),
    ),
    Mistake(
        "a port of apply",
        lambda: nn.apply_policy(Plain().apply, "bf16"),
        TypeError,
        ("Module.apply", "(model, "),
    ),
    Mistake(
        "a port of the other wing",
        lambda: nn.apply_policy(XNet(rngs()), "bf16"),
        TypeError,
        ("XNet", "nnx.apply_p"),
    ),
    Mistake(
        "a port without a policy", lambda: nn.apply_policy(Plain(), None), TypeError, ("None", TEXT)
    ),
    Mistake(
        "a port's rule that matches nothing",
        lambda: nn.apply_policy(Plain(), "bf16", {"haed": "f32"}).init(KEY, X),
        ValueError,
        ("'haed'", "seen: Dense_0"),
    ),
    Mistake(
        "a port's option misspelt",
        lambda: nn.apply_policy(Plain(), "bf16", own_code="skip"),
        ValueError,
        ("own_code", "'skip'", "'autocast', 'keep'"),
    ),
]

NNX = [
    Mistake(
        "a policy as dtype",
        lambda: nnx.Linear(4, 4, dtype=TEXT, rngs=rngs()),
        TypeError,
        ("dtype='mixed", WAY_OUT),
    ),
    Mistake(
        "a policy as param_dtype",
        lambda: nnx.Embed(4, 4, param_dtype=TEXT, rngs=rngs()),
        TypeError,
        (f"Embed(param_dtype='{TEXT}')", WAY_OUT),
    ),
    Mistake(
        "a short dtype",
        lambda: nnx.LayerNorm(4, dtype="bf16", rngs=rngs()),
        TypeError,
        ("'bf16'", "jnp.bfloat16"),
    ),
    Mistake(
        "policy=",
        lambda: nnx.Linear(4, 4, policy=TEXT, rngs=rngs()),
        TypeError,
        ("'policy'", f"Linear(..., {WAY_OUT})"),
    ),
    Mistake(
        "dtype_policy misspelt",
        lambda: XNet(rngs(), dtype_polcy="bf16"),
        TypeError,
        ("polcy", "dtype_policy='bf16'"),
    ),
    Mistake(
        "policy= of one's own",
        lambda: XNet(rngs(), policy=TEXT),
        TypeError,
        ("'policy'", f"XNet(..., {WAY_OUT})"),
    ),
    Mistake(
        "dtype= of one's own",
        lambda: XNet(rngs(), dtype=TEXT),
        TypeError,
        ("'dtype'", f"XNet(..., {WAY_OUT})"),
    ),
    Mistake(
        "a policy by position",
        lambda: XNet(rngs(), TEXT),
        TypeError,
        ("positional", f"XNet(..., {WAY_OUT})"),
    ),
    Mistake(
        "a tuple as policy",
        lambda: XNet(rngs(), dtype_policy=("f32", "bf16")),
        TypeError,
        ("XNet(dtype_policy=(", TEXT),
    ),
    Mistake(
        "keep_inputs as one text",
        lambda: nnx_keeping("time"),
        TypeError,
        ("Timed.keep_inputs", "('time',)"),
    ),
    Mistake(
        "keep_inputs misspelt",
        lambda: nnx_keeping(("tiem",)),
        ValueError,
        ("'tiem'", "take time, x"),
    ),
    Mistake(
        "keep_params as one text",
        lambda: nnx_keeping_params("scale"),
        TypeError,
        ("Scaled.keep_params", "tuple"),
    ),
    Mistake(
        "keep_params misspelt",
        lambda: nnx_keeping_params(("scael",)),
        DtypePolicyWarning,
        ("Scaled.keep_params", "scael", "It has: scale"),
    ),
    Mistake(
        "dtype against the policy",
        dtype_against_the_policy(lambda: nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs())),
        DtypePolicyWarning,
        AT_ARGUMENTS,
    ),
    Mistake(
        "a scope around a call",
        scope_around_a_built_model,
        DtypePolicyWarning,
        ("XNet", "build the model in", "apply_policy("),
    ),
    Mistake(
        "path rules while building",
        path_rules_while_building,
        ValueError,
        ("XNet", "Build the model first", "apply_policy("),
    ),
    Mistake(
        "a child from outside",
        child_from_outside,
        ValueError,
        ("Sequential(", "Linear", "Build them inside"),
    ),
    Mistake(
        "a policy set on a model",
        policy_set_on_a_built_model,
        ValueError,
        ("XNet", "'bf16'", "apply_policy("),
    ),
    Mistake(
        "a policy set in __init__",
        policy_set_in_the_constructor,
        ValueError,
        ("Late", "'bf16'", "dtype_policy='bf16'"),
    ),
    Mistake(
        "a port of a class",
        lambda: nnx.apply_policy(XNet, "bf16"),
        TypeError,
        ("class XNet", "make an instance"),
    ),
    Mistake(
        "a port swapped",
        lambda: nnx.apply_policy("bf16", XNet(rngs())),
        TypeError,
        ("'bf16'", "(model, policy)"),
    ),
    Mistake(
        "a port of a state",
        lambda: nnx.apply_policy(flax.nnx.state(XNet(rngs())), "bf16"),
        TypeError,
        ("State", "(model, "),
    ),
    Mistake(
        "a port of the other wing",
        lambda: nnx.apply_policy(Plain(), "bf16"),
        TypeError,
        ("Plain", "linen.apply_p"),
    ),
    Mistake(
        "a port's rule that matches nothing",
        lambda: nnx.apply_policy(XNet(rngs()), "bf16", {"haed": "f32"}),
        ValueError,
        ("'haed'", "seen: head"),
    ),
    Mistake(
        "a linen class in a rule",
        lambda: nnx.apply_policy(XNet(rngs()), "bf16", {nn.Dense: "f32"}),
        ValueError,
        ("Dense", "seen: head"),
    ),
    Mistake(
        "an average of half-precision params",
        lambda: nnx.EMA(flax.nnx.state(XNet(rngs(), dtype_policy="bf16"), nnx.Param), 0.99),
        ValueError,
        ("head/kernel is bfloat16", "master_params("),
    ),
]
