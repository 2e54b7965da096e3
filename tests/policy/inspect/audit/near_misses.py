"""Programs that look like one of the planted faults, with nothing wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
Program = Callable[[], tuple[Any, tuple[Any, ...]]]
NEAR_MISSES: dict[str, Program] = {}
FORWARD_ONLY: set[str] = set()  # their gradients have findings of their own


def shape(*dims: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def near_miss(name: str, *args: Any, forward_only: bool = False) -> Callable[[Any], Any]:
    """Adds a function and its arguments."""

    def add(fn: Any) -> Any:
        NEAR_MISSES[name] = lambda: (fn, args)
        FORWARD_ONLY.update([name] * forward_only)
        return fn

    return add


def near_miss_made(make: Program) -> Program:
    """Adds what a function makes: a function and its arguments."""
    NEAR_MISSES[make.__name__.removeprefix("_").replace("_", " ")] = make
    return make


W = {"w": shape(12, 4, 4)}
X, H = shape(4, 4, dtype=BF16), shape(4, 4, dtype=F16)


def product(params: Any, x: Any, i: int = 0) -> Any:
    return x @ params["w"][i].astype(x.dtype)


# --------------------------------------------------------------------------------------------------
# Activations
# --------------------------------------------------------------------------------------------------


def _between_matmuls(activation: Any, x: Any) -> Program:
    return lambda: (lambda params, x: product(params, activation(product(params, x)), 1), (W, x))


_ACTIVATIONS = "softplus log_sigmoid mish silu gelu selu celu hard_swish soft_sign"
for _name in _ACTIVATIONS.split():
    for _x in (X, H):
        NEAR_MISSES[f"{_name} in {_x.dtype}"] = _between_matmuls(getattr(jax.nn, _name), _x)


@near_miss("softplus before a normalisation", W, X)
def _softplus_before_a_normalisation(params, x):
    h = jax.nn.softplus(product(params, x)).astype(F32)
    normal = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return product(params, normal.astype(BF16), 1)


@near_miss("a gated linear unit", W, X)
def _a_gated_linear_unit(params, x):
    gate, up = jnp.split(product(params, x), 2, -1)
    return (jax.nn.silu(gate) * up) @ params["w"][1, :2].astype(BF16)


@near_miss("a gate of two halves of one array in float16", W, H)
def _a_gate_of_two_halves_of_one_array_in_float16(params, x):
    left, right = jnp.split(product(params, x), 2, -1)
    return jnp.sum((left * right).astype(F32))


# --------------------------------------------------------------------------------------------------
# Few terms
# --------------------------------------------------------------------------------------------------


@near_miss("a stack of residual blocks", W, X)
def _a_stack_of_residual_blocks(params, x):
    for i in range(12):
        x = x + jnp.tanh(product(params, x, i))
    return x


@near_miss("parallel branches of a block", W, X)
def _parallel_branches_of_a_block(params, x):
    for i in range(4):
        x = x + jnp.tanh(product(params, x, i)) + jax.nn.gelu(product(params, x, i + 4))
    return x


@near_miss("embeddings of three kinds", W, X)
def _embeddings_of_three_kinds(params, x):
    tables = params["w"].astype(BF16)
    return (tables[1] + tables[2] + x) @ tables[0]


@near_miss("a convolution with three taps", W, X)
def _a_convolution_with_three_taps(params, x):
    h = jnp.pad(product(params, x), ((1, 1), (0, 0)))
    return h[:-2] + h[1:-1] + h[2:]


@near_miss("a mixture of four experts", W, X, forward_only=True)
def _a_mixture_of_four_experts(params, x):
    gates = jax.nn.softmax(product(params, x).astype(F32)).astype(BF16)
    return sum(gates[:, i, None] * jnp.tanh(product(params, x, i + 1)) for i in range(4))


@near_miss("rotary embeddings", W, X)
def _rotary_embeddings(params, x):
    q = product(params, x)
    angles = jnp.arange(4, dtype=F32)[:, None] * jnp.asarray([1.0, 0.01], F32)[None]
    cos, sin = jnp.cos(angles).astype(BF16), jnp.sin(angles).astype(BF16)
    first, second = jnp.split(q, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1) @ q.T


@near_miss("rotary embeddings by complex numbers", W, X)
def _rotary_embeddings_by_complex_numbers(params, x):
    q = product(params, x).astype(F32)
    turned = (
        lax.complex(q[:, :2], q[:, 2:])
        * jnp.exp(lax.complex(jnp.zeros(4), jnp.arange(4.0)))[:, None]
    )
    return jnp.concatenate([turned.real, turned.imag], -1).astype(BF16) @ params["w"][1].astype(
        BF16
    )


@near_miss_made
def _neighbours_of_a_ring():
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")

    def local(h):
        left = lax.ppermute(h, "i", [(i, (i + 1) % 4) for i in range(4)])
        right = lax.ppermute(h, "i", [((i + 1) % 4, i) for i in range(4)])
        return (left + h + right) / 3

    def fn(params, x):
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(product(params, x))

    return fn, (W, X)
