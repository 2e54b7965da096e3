"""Modules of Flax's with one fault each, in both wings, and how modules are nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from policy.inspect.audit.finding_kinds import (
    CARRY,
    CONSTANT,
    FUNCTION,
    LEAK,
    MIXED,
    PROMOTION,
    REDUCTION,
    REPEATED,
    ROUND_TRIP,
)

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TOKENS = jnp.zeros((2, 5), jnp.int32)


def wide_sum(x: Any) -> Any:
    return jnp.sum(x.astype(F32))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a module.

    Attributes:
      name: what was planted.
      kind, primitive: of the finding.
      body: ``body(parts, x)``, from what the wing offers and the input; returns a half array.
      dtype: of the input.
      path: below the module ``inner`` that holds it: where it is found.
      backward, mixes: as in `tests.policy.inspect.audit.faults`.
    """

    name: str
    kind: str
    primitive: str
    body: Callable[[Any, Any], Any]
    dtype: Any = BF16
    path: str = ""
    backward: bool = False
    mixes: bool = False

    def __str__(self) -> str:
        return self.name


def _softmax(parts, x):
    return jax.nn.softmax(parts.dense(x))


def _pool(parts, x):
    return nn.avg_pool(parts.dense(x)[None, :, :, None], (2, 2), (1, 1))[0, :, :, 0]


def _norm(parts, x):
    h = parts.dense(x)
    return h * jax.lax.rsqrt(jnp.mean(h, -1, keepdims=True) ** 2 + 1)


def _mixed(parts, x):
    return jnp.einsum("bd,de->be", x, parts.weight()).astype(x.dtype)


def _twice(parts, x):
    w = parts.weight()
    return jnp.tanh(x @ w.astype(x.dtype)) @ w.astype(x.dtype)


def _round_trip(parts, x):
    return parts.dense(x).astype(F32).astype(x.dtype)


def _leak(parts, x):
    return parts.other(parts.norm(parts.dense(x))).astype(x.dtype)


def _carry(parts, x):
    return jax.lax.scan(lambda total, row: (total + row, None), x[0] * 0, parts.dense(x))[0]


def _mask(parts, x):
    return jnp.tanh(jnp.where(x > 0, parts.dense(x), -1e9))


def _lookup(parts, x):
    return parts.embed(TOKENS)


def _promotion(parts, x):
    return x + parts.weight()[:1]


def _online_softmax(parts, x):
    def step(state, row):
        largest, total = state
        new = jnp.maximum(largest, row)
        return (new, total * jnp.exp(largest - new) + jnp.exp(row - new)), None

    return jax.lax.scan(step, (jnp.full(4, -jnp.inf, x.dtype), x[0] * 0), parts.dense(x))[0][1]


def _norm_by_dot(parts, x):
    h = parts.dense(x)
    return h / jnp.sqrt(jnp.einsum("bd,bd->b", h, h))[:, None]


def _complex(parts, x):
    return (parts.dense(x) * jax.lax.complex(parts.weight(), parts.weight())).real


FAULTS = [
    Fault("a softmax in bfloat16", FUNCTION, "exp", _softmax),
    Fault("an average pool in bfloat16", REDUCTION, "reduce_window_sum", _pool, mixes=True),
    Fault("a normalisation in float16", FUNCTION, "rsqrt", _norm, F16),
    Fault("a matmul of bfloat16 and float32", MIXED, "dot_general", _mixed, mixes=True),
    Fault("a weight that is cast twice", REPEATED, "convert_element_type", _twice),
    Fault("a cast there and back", ROUND_TRIP, "convert_element_type", _round_trip),
    Fault(
        "float32 that leaks from a LayerNorm", LEAK, "dot_general", _leak, path="norm", mixes=True
    ),
    Fault("a sum that a scan carries in bfloat16", CARRY, "scan", _carry),
    Fault("a mask of -1e9 in float16", CONSTANT, "convert_element_type", _mask, F16),
    Fault(
        "the gradient of an Embed in bfloat16",
        REDUCTION,
        "scatter-add",
        _lookup,
        path="embed",
        backward=True,
    ),
    Fault("a promotion that nobody asked for", PROMOTION, "add", _promotion, mixes=True),
    Fault("a softmax row by row in float16", CARRY, "scan", _online_softmax, F16),
    Fault("a norm by einsum in float16", FUNCTION, "div", _norm_by_dot, F16),
    Fault("half times complex", PROMOTION, "mul", _complex, mixes=True),
]


# --------------------------------------------------------------------------------------------------
# linen
# --------------------------------------------------------------------------------------------------


class LinenInner(nn.Module):
    body: Any
    dtype: Any

    def setup(self) -> None:
        self.dense = nn.Dense(4, dtype=self.dtype)
        self.norm = nn.LayerNorm()
        self.other = nn.Dense(4)
        self.embed = nn.Embed(8, 4, dtype=self.dtype)
        self.kernel = self.param("kernel", nn.initializers.ones, (4, 4))

    def weight(self) -> Any:
        return self.kernel

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class LinenNet(nn.Module):
    body: Any
    dtype: Any
    wrap: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.wrap(LinenInner)(self.body, self.dtype, name="inner")(x)


class LinenScanned(nn.Module):
    """The inner module as one step of `nn.scan`."""

    body: Any
    dtype: Any
    wrap: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        inner: Any = LinenInner  # whose call takes no carry

        class Step(inner):
            def __call__(self, n: Any, _: None) -> Any:
                return n + 1, self.body(self, x)

        step = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False}, length=3)
        return step(self.body, self.dtype, name="inner")(0, None)[1]


LINEN: dict[str, Any] = {
    "linen": lambda body, dtype: LinenNet(body, dtype, lambda cls: cls),
    "linen, in remat": lambda body, dtype: LinenNet(body, dtype, nn.remat),
    "linen, in jit": lambda body, dtype: LinenNet(body, dtype, nn.jit),
    "linen, in scan": lambda body, dtype: LinenScanned(body, dtype, None),
}

# --------------------------------------------------------------------------------------------------
# nnx
# --------------------------------------------------------------------------------------------------


class NnxInner(nnx.Module):
    def __init__(self, body: Any, dtype: Any):
        rngs = nnx.Rngs(0)
        self.body = body
        self.dense = nnx.Linear(4, 4, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.other = nnx.Linear(4, 4, rngs=rngs)
        self.embed = nnx.Embed(8, 4, dtype=dtype, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((4, 4)))

    def weight(self) -> Any:
        return self.kernel[...]

    def __call__(self, x: Any) -> Any:
        return self.body(self, x)


class NnxNet(nnx.Module):
    def __init__(self, body: Any, dtype: Any, wrap: Any):
        self.inner, self.wrap = NnxInner(body, dtype), wrap

    def __call__(self, x: Any) -> Any:
        return self.wrap(lambda inner, x: inner(x))(self.inner, x)


NNX: dict[str, Any] = {
    "nnx": lambda body, dtype: NnxNet(body, dtype, lambda call: call),
    "nnx, in remat": lambda body, dtype: NnxNet(body, dtype, nnx.remat),
    "nnx, in jit": lambda body, dtype: NnxNet(body, dtype, nnx.jit),
}
