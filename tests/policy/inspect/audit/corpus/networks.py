"""Whole networks with nothing wrong in them: in float32, mixed by hand, by autocast, by layers."""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import PartitionSpec

import policy
from mpmodules import linen as nn
from mpmodules import nnx
from policy.sharding import vary
from tests.policy.inspect.audit.corpus.planting import BF16, F32, plant, planted, shape


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: shape(*dims, dtype=F32) for name, dims in shapes.items()}


QKV, MLP = weights(q=(4, 4), k=(4, 4), v=(4, 4)), weights(up=(4, 8), down=(8, 4))
X, WIDE = shape(2, 3, 4), shape(2, 4, dtype=F32)


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
    return (normed * scale).astype(x.dtype)


@planted("clean(params=weights(w=(3, 4, 4), scale=(3, 4)), x=X)")
def _a_scan_of_layers_in_bfloat16(params, x):
    def layer(x, layer_params):
        h = layer_norm(x, layer_params["scale"])
        return x + jax.nn.relu(h @ layer_params["w"].astype(BF16)), None

    return lax.scan(jax.checkpoint(layer), x, params)[0]


@planted("clean(params=weights(w=(4, 4)), xs=shape(3, 2, 4))")
def _a_mean_that_a_scan_carries_in_float32(params, xs):
    def add(total, x):
        return total + (x @ params["w"].astype(BF16)).astype(F32).mean(), None

    return lax.scan(add, jnp.zeros(()), xs)[0] / 3


@planted(
    'clean(params=weights(w=(4, 4)), x=shape(2, 4), never=("vmap", "shard_map", "custom_vjp"))'
)
def _shards_that_are_summed_in_float32(params, x):
    def local(w, x):
        w = vary(w, "i", "float32")  # before its cast: gradients are summed in float32
        return lax.pmean((x @ w.astype(BF16)).astype(F32).sum(), "i")

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec("i")), out_specs=spec)(
        params["w"], x
    )


class FlaxBlock(flax_nn.Module):
    @flax_nn.compact
    def __call__(self, x: Any) -> Any:
        h = flax_nn.LayerNorm()(x)
        x = x + flax_nn.MultiHeadDotProductAttention(2)(h)
        x = x + flax_nn.Dense(4)(flax_nn.gelu(flax_nn.Dense(8)(x)))
        return flax_nn.softmax(flax_nn.BatchNorm(use_running_average=False)(x))


_BLOCK, _INPUT = FlaxBlock(), shape(2, 3, 4, dtype=F32)
_VARIABLES = jax.eval_shape(_BLOCK.init, jax.random.key(0), _INPUT)


def _applied(variables: Any, x: Any) -> Any:
    return _BLOCK.apply(variables, x, mutable=["batch_stats"])[0]


class NnxBlock(nnx.Module):
    def __init__(self) -> None:
        rngs = flax_nnx.Rngs(0)
        self.dense, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dense(x))


with policy.use_policy("bfloat16"):
    _NNX_BLOCK = flax_nnx.eval_shape(NnxBlock)
_LINEN_BLOCK = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False)])
with policy.use_policy("mixed_bfloat16"):
    _STATISTICS = jax.eval_shape(_LINEN_BLOCK.init, jax.random.key(0), WIDE)


@planted("clean(variables=_STATISTICS, x=WIDE, states={})")
def _running_statistics_of_linen(variables, x):
    with policy.use_policy("mixed_bfloat16"):
        return _LINEN_BLOCK.apply(variables, x, mutable=["batch_stats"])


_TX = policy.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")
_PARAMS = weights(w=(4, 4))


_STATE = jax.eval_shape(_TX.init, _PARAMS)


@planted("clean(params=_PARAMS, state=_STATE, x=shape(4, 4), states={}, backward=False)")
def _a_step_that_mixed_precision_takes(params, state, x):
    loss = lambda params: jnp.tanh(x @ params["w"].astype(BF16)).astype(F32).mean()  # noqa: E731
    params, state, _ = policy.apply_gradients(_TX, params, state, jax.grad(loss)(params))
    return params, state


plant(
    """
clean(params=QKV, x=shape(2, 3, 4, dtype=F32))
    float32 attention: attention(params, x)
clean(params=QKV, x=X)
    attention in bfloat16 with a float32 softmax: attention(params, x, lambda x: x.astype(BF16))
clean(model=_NNX_BLOCK, x=shape(4, 4), states={})
    running statistics of nnx: model(x)
clean(variables=_VARIABLES, x=_INPUT, states={})
    Flax under autocast to mixed_bfloat16: policy.autocast(_applied, "mixed_bfloat16")(variables, x)
    Flax under autocast to mixed_float16: policy.autocast(_applied, "mixed_float16")(variables, x)
    Flax under autocast to bfloat16: policy.autocast(_applied, "bfloat16")(variables, x)
clean(params=MLP, x=WIDE)
    a float32 network:
        h = jax.nn.gelu(x @ params["up"])
        jnp.mean(jax.nn.log_softmax(h @ params["down"]))
clean(params=weights(w=(4, 4)), xs=shape(3, 2, 4, dtype=F32))
    a float32 scan that sums:
        total, _ = lax.scan(lambda total, x: (total + x @ params["w"], None), jnp.zeros((2, 4)), xs)
        total.sum() / 3
clean(params=MLP, x=WIDE, labels=shape(2, dtype=I32))
    a network in bfloat16 with a float32 loss:
        h = jax.nn.silu(x.astype(BF16) @ params["up"].astype(BF16))
        logits = (h @ params["down"].astype(BF16)).astype(F32)
        optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
clean(params=weights(w=(4, 4), scale=(4,)), x=X)
    a block in bfloat16 with float32 norms:
        h = layer_norm(x, params["scale"])
        x = x + jnp.tanh(h @ params["w"].astype(BF16))
        layer_norm(x, params["scale"])
clean(params=weights(w0=(4, 4), w1=(4, 4), scale=(4,)), x=shape(2, 3, 4, dtype=F32))
    a float32 residual stream:
        for name in ("w0", "w1"):
            h = layer_norm(x, params["scale"]).astype(BF16)
            x = x + (h @ params[name].astype(BF16)).astype(F32)
        x
"""
)
