"""Mistakes in modules, in both apis."""

# Wrong calls are the point.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
from flax.errors import InvalidInstanceModuleError

from mpmodules import linen as nn
from mpmodules import nnx, use_policy
from policy import DtypePolicyWarning

X = jnp.ones((2, 4))
KEY = jax.random.key(0)
TEXT = "mixed_bfloat16"
WAY_OUT = f"dtype_policy='{TEXT}'"
DELETE = "dtype=float32 … Delete the argument … dtype_policy"


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


def rngs() -> Any:
    return nnx.Rngs(0)


def dense(**options: Any) -> None:
    nn.Dense(4, **options).init(KEY, X)


def linear(**options: Any) -> None:
    nnx.Linear(4, 4, rngs=rngs(), **options)


def linen_kept(**attributes: Any) -> None:
    class Kept(nn.Module):
        vars().update(attributes)

        @nn.compact
        def __call__(self, x, time):
            return x * self.param("scale", nn.initializers.ones, (1, 4)) + time

    Kept(dtype_policy="bf16").init(KEY, X, X)


def nnx_kept(**attributes: Any) -> None:
    class Kept(nnx.Module):
        vars().update(attributes)

        def __init__(self):
            self.scale = nnx.Param(jnp.ones((1, 4)))

        def __call__(self, x, time):
            return x * self.scale + time

    Kept(dtype_policy="bf16")


def under_a_policy(build: Any, **options: Any) -> None:
    with use_policy(TEXT):
        build(**options)


def path_rules() -> None:
    with use_policy(TEXT, rules={"head": "f32"}):
        XNet(rngs())


def policy_set_in_the_constructor() -> None:
    class Late(nnx.Module):
        def __init__(self, rngs):
            self.dtype_policy = "bf16"
            self.head = nnx.Linear(4, 4, rngs=rngs)

    Late(rngs())


def in_api(layer: Any, kept: Any, port: Any, net: Any, model: Any, other: Any) -> dict[Any, Any]:
    """Returns the mistakes that both APIs know; `other`: a model of the other and its message."""
    cls, instance, name = model
    return {
        TypeError: {
            f"(dtype='{TEXT}') … {WAY_OUT}": lambda: layer(dtype=TEXT),
            "dtype='bf16' … jnp.bfloat16": lambda: layer(dtype="bf16"),
            f"'policy' … (..., {WAY_OUT})": lambda: layer(policy=TEXT),
            f"Net(..., {WAY_OUT})": lambda: net(policy=TEXT),
            "polcy … dtype_policy=": lambda: net(dtype_polcy="bf16"),
            f"positional … Net(..., {WAY_OUT})": lambda: net(TEXT),
            "Kept.keep_inputs … ('time',)": lambda: kept(keep_inputs="time"),
            f"class {name} … make an instance": lambda: port(cls, "bf16"),
            "'bf16' … (model, policy)": lambda: port("bf16", instance()),
            other[1]: lambda: port(other[0](), "bf16"),
            f"None … {TEXT}": lambda: port(instance(), None),
        },
        ValueError: {
            "'tiem' … time, x": lambda: kept(keep_inputs=("tiem",)),
        },
        DtypePolicyWarning: {
            DELETE: lambda: under_a_policy(layer, dtype=jnp.float32),
        },
    }


def merged(*tables: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    kinds = dict.fromkeys(kind for table in tables for kind in table)
    return {kind: {k: v for t in tables for k, v in t.get(kind, {}).items()} for kind in kinds}


LINEN_ALONE = {
    InvalidInstanceModuleError: {
        "on an instance": [lambda: Net.init_with_output(KEY, X), lambda: Net.apply({}, X)],
    },
    TypeError: {
        "class attribute": lambda: Net(keep_inputs=("x",)),
        "Module.apply … (": lambda: nn.apply_policy(Plain().apply, "bf16"),
    },
    ValueError: {},
    DtypePolicyWarning: {
        "dtype=float16 … bfloat16 … Delete the argument": lambda: dense(
            dtype=jnp.float16, dtype_policy="bf16"
        )
    },
}
NNX_ALONE = {
    TypeError: {
        f"Embed(param_dtype='{TEXT}') … {WAY_OUT}": lambda: nnx.Embed(
            4, 4, param_dtype=TEXT, rngs=rngs()
        ),
        "State … (model, ": lambda: nnx.apply_policy(flax.nnx.state(XNet(rngs())), "bf16"),
    },
    ValueError: {
        "Building XNet … path rules can't … Build the model first … apply_policy(": path_rules,
        "Late … dtype_policy='bf16'": policy_set_in_the_constructor,
        "Dense … seen: head": lambda: nnx.apply_policy(XNet(rngs()), "bf16", {nn.Dense: "f32"}),
        "head/kernel is bfloat16 … master_params(": lambda: nnx.EMA(
            flax.nnx.state(XNet(rngs(), dtype_policy="bf16"), nnx.Param), 0.99
        ),
    },
}


def xnet(*args: Any, **options: Any) -> Any:
    return XNet(rngs(), *args, **options)


LINEN = merged(
    in_api(
        *(dense, linen_kept, nn.apply_policy, Net),
        model=(Plain, Plain, "Plain"),
        other=(xnet, "XNet … nnx.apply_p"),
    ),
    LINEN_ALONE,
)
NNX = merged(
    in_api(
        *(linear, nnx_kept, nnx.apply_policy, xnet),
        model=(XNet, xnet, "XNet"),
        other=(Plain, "Plain … linen.apply_p"),
    ),
    NNX_ALONE,
)
