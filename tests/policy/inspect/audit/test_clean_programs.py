"""Programs with nothing wrong in them: no finding, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from policy import audit, autocast
from policy.sharding import vary
from tests.policy.inspect.audit import near_misses_carried, near_misses_eight_bits
from tests.policy.inspect.audit.near_misses import FORWARD_ONLY, NEAR_MISSES, Program, shape

assert near_misses_carried and near_misses_eight_bits  # add to NEAR_MISSES

BF16, F32 = jnp.bfloat16, jnp.float32
PROGRAMS: dict[str, Program] = {}


def program(name: str, *args: Any) -> Callable[[Any], Any]:
    """Adds a function and its arguments."""

    def add(fn: Any) -> Any:
        PROGRAMS[name] = lambda: (fn, args)
        return fn

    return add


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: shape(*dims) for name, dims in shapes.items()}


# --------------------------------------------------------------------------------------------------
# float32
# --------------------------------------------------------------------------------------------------


def attention(params: Any, x: Any, to: Any = lambda x: x) -> Any:
    """Causal, masked and with a float32 softmax; `to` narrows what is multiplied."""
    q, k, v = (to(x) @ to(params[name]) for name in "qkv")
    logits = jnp.einsum("btd,bsd->bts", q, k).astype(F32) * x.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(F32).min))
    return jnp.einsum("bts,bsd->btd", to(weights), v)


def layer_norm(x: Any, scale: Any) -> Any:
    """In float32; the dtype of `x` out."""
    wide = x.astype(F32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return (normed * scale[None, None]).astype(x.dtype)


@program("a float32 network", weights(up=(4, 8), down=(8, 4)), shape(2, 4))
def _a_float32_network(params, x):
    h = jax.nn.gelu(x @ params["up"])
    return jnp.mean(jax.nn.log_softmax(h @ params["down"]))


program("float32 attention", weights(q=(4, 4), k=(4, 4), v=(4, 4)), shape(2, 3, 4))(attention)


@program("a float32 scan that sums", weights(w=(4, 4)), shape(3, 2, 4))
def _a_float32_scan_that_sums(params, xs):
    total, _ = lax.scan(lambda total, x: (total + x @ params["w"], None), jnp.zeros((2, 4)), xs)
    return total.sum() / 3


# --------------------------------------------------------------------------------------------------
# Mixed by hand
# --------------------------------------------------------------------------------------------------


@program(
    "a network in bfloat16 with a float32 loss",
    weights(up=(4, 8), down=(8, 4)),
    shape(2, 4),
    shape(2, dtype=jnp.int32),
)
def _a_network_in_bfloat16_with_a_float32_loss(params, x, labels):
    h = jax.nn.silu(x.astype(BF16) @ params["up"].astype(BF16))
    logits = (h @ params["down"].astype(BF16)).astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


program(
    "attention in bfloat16 with a float32 softmax",
    weights(q=(4, 4), k=(4, 4), v=(4, 4)),
    shape(2, 3, 4, dtype=BF16),
)(lambda params, x: attention(params, x, lambda x: x.astype(BF16)))


@program(
    "a block in bfloat16 with float32 norms",
    weights(w=(4, 4), scale=(4,)),
    shape(2, 3, 4, dtype=BF16),
)
def _a_block_in_bfloat16_with_float32_norms(params, x):
    h = layer_norm(x, params["scale"])
    x = x + jnp.tanh(h @ params["w"].astype(BF16))
    return layer_norm(x, params["scale"])


@program("a float32 residual stream", weights(w0=(4, 4), w1=(4, 4), scale=(4,)), shape(2, 3, 4))
def _a_float32_residual_stream(params, x):
    for name in ("w0", "w1"):
        h = layer_norm(x, params["scale"]).astype(BF16)
        x = x + (h @ params[name].astype(BF16)).astype(F32)
    return x


@program(
    "a scan of layers in bfloat16", weights(w=(3, 4, 4), scale=(3, 4)), shape(2, 3, 4, dtype=BF16)
)
def _a_scan_of_layers_in_bfloat16(params, x):
    def layer(x, layer_params):
        h = layer_norm(x, layer_params["scale"])
        return x + jax.nn.relu(h @ layer_params["w"].astype(BF16)), None

    return lax.scan(jax.checkpoint(layer), x, params)[0]


@program("a mean that a scan carries in float32", weights(w=(4, 4)), shape(3, 2, 4, dtype=BF16))
def _a_mean_that_a_scan_carries_in_float32(params, xs):
    def add(total, x):
        return total + (x @ params["w"].astype(BF16)).astype(F32).mean(), None

    return lax.scan(add, jnp.zeros(()), xs)[0] / 3


@program("shards that are summed in float32", weights(w=(4, 4)), shape(2, 4, dtype=BF16))
def _shards(params, x):
    def local(w, x):
        w = vary(w, "i", "float32")  # before its cast: gradients are summed in float32
        return lax.pmean((x @ w.astype(BF16)).astype(F32).sum(), "i")

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec("i")), out_specs=spec)(
        params["w"], x
    )


# --------------------------------------------------------------------------------------------------
# By autocast
# --------------------------------------------------------------------------------------------------


class FlaxBlock(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        h = flax.linen.LayerNorm()(x)
        x = x + flax.linen.MultiHeadDotProductAttention(2)(h)
        x = x + flax.linen.Dense(4)(flax.linen.gelu(flax.linen.Dense(8)(x)))
        return flax.linen.softmax(flax.linen.BatchNorm(use_running_average=False)(x))


def cast_automatically(policy: str) -> tuple[Any, tuple[Any, ...]]:
    model = FlaxBlock()
    variables = jax.eval_shape(model.init, jax.random.key(0), shape(2, 3, 4))

    def fn(variables, x):
        out, _ = model.apply(variables, x, mutable=["batch_stats"])
        return out

    return autocast(fn, policy), (variables, shape(2, 3, 4))


for _policy in ("mixed_bfloat16", "mixed_float16", "bfloat16"):
    PROGRAMS[f"Flax under autocast to {_policy}"] = lambda policy=_policy: cast_automatically(
        policy
    )


ALL = {**PROGRAMS, **NEAR_MISSES}
CASES = [
    (name, backward)
    for name in ALL
    for backward in (False, True)
    if not (backward and name in FORWARD_ONLY)
]


@pytest.mark.parametrize(
    ("name", "backward"),
    CASES,
    ids=[f"{name}-{'backward' if backward else 'forward'}" for name, backward in CASES],
)
def test_no_finding(name, backward):
    fn, args = ALL[name]()
    report = audit(fn, *args, backward=backward)
    assert not report.findings, str(report)
    assert any(op.kind == "dot" for op in report.operations)
    assert backward <= any(op.is_backward for op in report.operations)
