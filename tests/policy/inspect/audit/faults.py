"""Programs with one fault each, and places to plant them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

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


@dataclasses.dataclass(frozen=True)
class Fault:
    """A function with something wrong in it.

    Attributes:
      name: what was planted.
      kind, primitive: of the finding.
      run: the function.
      dtypes: of its arguments, each (4, 4).
      backward: whether it shows in the gradients only.
      mixes: whether it needs JAX's implicit promotion.
    """

    name: str
    kind: str
    primitive: str
    run: Callable[..., Any]
    dtypes: tuple[Any, ...] = (BF16,)
    backward: bool = False
    mixes: bool = False

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct((4, 4), dtype) for dtype in self.dtypes)

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(
    name: str, kind: str, primitive: str, *dtypes: Any, **options: Any
) -> Callable[[Any], Any]:
    def add(run: Any) -> Any:
        FAULTS.append(Fault(name, kind, primitive, run, dtypes or (BF16,), **options))
        return run

    return add


fault("a softmax in bfloat16", FUNCTION, "exp")(jax.nn.softmax)
fault("an average pool in bfloat16", REDUCTION, "reduce_window_sum")(
    lambda x: lax.reduce_window(x, x.dtype.type(0), lax.add, (2, 2), (1, 1), "VALID") / 4
)


@fault("a normalisation in float16", FUNCTION, "rsqrt", F16)
def _norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-3)


fault("a matmul of bfloat16 and float32", MIXED, "dot_general", BF16, F32, mixes=True)(
    lambda x, w: (x @ w).astype(BF16)
)
fault("a matmul of bfloat16 and float32 in lax", MIXED, "dot_general", BF16, F32)(
    lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32).astype(
        BF16
    )
)
fault("a weight that is cast twice", REPEATED, "convert_element_type", BF16, F32)(
    lambda x, w: jnp.tanh(x @ w.astype(BF16)) @ w.astype(BF16)
)
fault("a cast there and back that loses digits", ROUND_TRIP, "convert_element_type", F32)(
    lambda x: jnp.tanh(x.astype(BF16).astype(F32))
)
fault("a cast there and back for nothing", ROUND_TRIP, "convert_element_type")(
    lambda x: jnp.tanh(x.astype(F32).reshape(2, 8).astype(BF16))
)


@fault("float32 that leaks from a normalisation", LEAK, "dot_general", BF16, BF16, BF16)
def _leak(x, up, down):
    wide = (x @ up).astype(F32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide @ down.astype(F32)).astype(BF16)


fault("a sum that a scan carries in bfloat16", CARRY, "scan")(
    lambda x: lax.scan(lambda total, row: (total + row, None), jnp.zeros(4, x.dtype), x)[0]
)


@fault("a sum that a loop rounds to bfloat16", CARRY, "scan", F32)
def _rounded_carry(x):
    def add(i, total):
        return (total.astype(F32) + x[i]).astype(BF16)

    return lax.fori_loop(0, 4, add, jnp.zeros(4, BF16))


@fault("an average that a while loop carries in float16", CARRY, "while", F16)
def _average(x):
    step = lambda state: (state[0] + 1, state[1] * 0.9 + x[state[0]] * 0.1)  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 4, step, (0, x[0]))[1]


@fault("a running mean that a scan carries in bfloat16", CARRY, "scan")
def _running_mean(x):
    def step(state, row):
        count, mean = state
        return (count + 1, mean + (row - mean) / (count + 1).astype(BF16)), None

    return lax.scan(step, (jnp.int32(0), jnp.zeros(4, BF16)), x)[0][1]


fault("a product that a scan carries where it is not skipped", CARRY, "scan")(
    lambda x: lax.scan(
        lambda total, row: (jnp.where(row > 0, total * row, total), None), jnp.ones(4, BF16), x
    )[0]
)
fault("a mask of -1e9 in float16", CONSTANT, "convert_element_type", F16)(
    lambda x: jnp.tanh(jnp.where(x > 0, x, -1e9))
)
fault("an epsilon that float16 has no number for", CONSTANT, "add", F16)(
    lambda x: x / (jnp.abs(x) + 1e-9)
)


@fault("the gradient of a lookup in bfloat16", REDUCTION, "scatter-add", backward=True)
def _lookup(table):
    tokens = jnp.zeros((2, 3), jnp.int32) + jnp.argmax(table[0]).astype(jnp.int32)
    return jnp.tanh(table[tokens])


fault("the gradient of the largest numbers", REDUCTION, "scatter-add", backward=True)(
    lambda x: jnp.tanh(lax.top_k(x, 2)[0])
)
fault("a silu by hand", FUNCTION, "exp")(lambda x: x / (1 + jnp.exp(-x)))
fault("the gradient of a bias in bfloat16", REDUCTION, "reduce_sum", BF16, backward=True)(
    lambda x: jnp.tanh(x[:1] + jnp.zeros((8, 4), BF16)) * 0.5
)
fault("a promotion that nobody asked for", PROMOTION, "add", BF16, F32, mixes=True)(
    lambda x, bias: x + bias
)
fault("a cumulative sum in bfloat16", REDUCTION, "cumsum")(lambda x: lax.cumsum(x, 1))
fault("squares in float16 that are summed", FUNCTION, "mul", F16)(
    lambda x: jnp.sqrt(jnp.sum((x * x).astype(F32)))
)


# --------------------------------------------------------------------------------------------------
# Places
# --------------------------------------------------------------------------------------------------


def _in_scan(run: Any) -> Any:
    def placed(*args: Any) -> Any:
        return lax.scan(lambda n, _: (n + 1, run(*args)), 0, None, length=3)[1]

    return placed


def _in_cond(run: Any) -> Any:
    def placed(*args: Any) -> Any:
        like = jax.eval_shape(run, *args)
        return lax.cond(args[0][0, 0] > 0, run, lambda *_: jnp.zeros(like.shape, like.dtype), *args)

    return placed


def _in_while(run: Any) -> Any:
    def placed(*args: Any) -> Any:
        like = jax.eval_shape(run, *args)
        first = (0, jnp.zeros(like.shape, like.dtype))
        return lax.while_loop(
            lambda state: state[0] < 3, lambda state: (state[0] + 1, run(*args)), first
        )[1]

    return placed


def _in_shard_map(run: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return lambda *args: jax.shard_map(
        run, mesh=mesh, in_specs=tuple(spec for _ in args), out_specs=spec, check_vma=False
    )(*args)


def _in_custom_vjp(run: Any) -> Any:
    ruled = jax.custom_vjp(run)
    ruled.defvjp(lambda *args: jax.vjp(run, *args), lambda backward, ct: backward(ct))
    return ruled


PLACES: dict[str, Callable[[Any], Any]] = {
    "the top level": lambda run: run,
    "jit": jax.jit,
    "scan": _in_scan,
    "cond": _in_cond,
    "while": _in_while,
    "remat": jax.checkpoint,
    "shard_map": _in_shard_map,
    "custom_vjp": _in_custom_vjp,
    "jit in remat in scan": lambda run: _in_scan(jax.checkpoint(jax.jit(run))),
    "vmap": lambda run: (
        lambda *args: jax.vmap(run)(*(jnp.broadcast_to(arg[None], (2, 4, 4)) for arg in args))
    ),
}


def scoped(run: Any) -> Any:
    """The function, in two modules' scopes: ``Net/inner``."""

    def named(*args: Any) -> Any:
        with jax.named_scope("Net"), jax.named_scope("inner"):
            return run(*args)

    return named
