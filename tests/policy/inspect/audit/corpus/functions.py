"""Exponentials, logarithms, roots and squares in half precision, and whole networks with nothing
wrong in them: in float32, mixed by hand, by autocast, by layers.
"""

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

plant(
    """
low-precision-function exp
    a softmax in bfloat16: jax.nn.softmax(x)
    a log_softmax: jax.nn.log_softmax(x)
    a logsumexp: jax.nn.logsumexp(x, -1)
    attention without float32: jax.nn.softmax(x @ x.T) @ x
    a silu by hand: x / (1 + jnp.exp(-x))
    a kernel of distances:
        jnp.exp(-jnp.square(x[:, None].astype(F32) - x.astype(F32)).sum(-1).astype(x.dtype))
    a softmax of two logits by hand: jnp.exp(x[0]) / (jnp.exp(x[0]) + jnp.exp(x[1]))
    a softmax of three columns by hand:
        jnp.exp(x[:, 0]) / sum((jnp.exp(x[:, i]) for i in range(3)))
    exponentials that are added and multiplied: (jnp.exp(x[0]) + jnp.exp(x[1])) @ x
    values weighted by exponentials: (jnp.exp(x[0]) * x[1] + jnp.exp(x[2]) * x[3]) @ x
    exponentials of a list: jnp.log(sum((jnp.exp(x[i]) for i in range(3))))
    a mixture of two: jnp.log(0.3 * jnp.exp(-x[0]) + 0.7 * jnp.exp(-x[1]))
    logaddexp: jnp.logaddexp(x[0], x[1])
    a perplexity: jnp.exp(x.mean())
    a ratio of probabilities: jnp.minimum(jnp.exp(x[0] - x[1]), 1.2).astype(F32).mean()
low-precision-function exp(mean=X, log_variance=X)
    the divergence of two normal distributions:
        0.5 * (mean ** 2 + jnp.exp(log_variance) - 1 - log_variance).sum()
    a poisson loss: (jnp.exp(mean) - log_variance * mean).mean()
    an exponential of a softplus: jnp.exp(-jax.nn.softplus(mean @ log_variance)) @ log_variance
low-precision-function log(p=X, y=X)
    a cross entropy of probabilities:
        -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).astype(F32).mean()
    an entropy: -(p * jnp.log(p)).sum(-1)
    a cross entropy of Optax's: optax.softmax_cross_entropy(p, y)
    the logits of probabilities: jnp.log(p / (1 - p))
    the likelihood of a squashed action: -jnp.log(1 - jnp.tanh(p) ** 2 + 0.001).sum(-1)
low-precision-function lgamma
    a gamma function: lax.lgamma(x).astype(F32).sum()
low-precision-function exp(x=X, w=X)
    a softplus that is not stable: jnp.log1p(jnp.exp(x @ w)) @ w
low-precision-function pow
    powers of a discount: (x * 0.99 ** jnp.arange(4, dtype=x.dtype)).sum()
    the correction of a bias: x / (1 - jnp.asarray(0.9, x.dtype) ** x[0, 0])
    an inverse root by a power: x * x.var(-1, keepdims=True) ** (-0.5)
low-precision-function cos
    rotary angles: x * jnp.cos(x[:, :1] * jnp.asarray([1.0, 0.1, 0.01, 0.001], BF16))
    normal numbers by hand: jnp.sqrt(-2 * jnp.log(x)) * jnp.cos(6.28 * x)
low-precision-function sin
    fourier features: jnp.sin(x * 1000) @ x
    sinc: jnp.sinc(x)
low-precision-function rsqrt
    standardize: jax.nn.standardize(x)
low-precision-function div
    a division by a deviation: x / x.std(-1, keepdims=True)
    a division by a norm: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    a cosine: (x[0] * x[1]).sum() / (jnp.linalg.norm(x[0]) * jnp.linalg.norm(x[1]))
low-precision-function sqrt
    the root of a mean of squares: jnp.sqrt(jnp.mean(jnp.square(x)))
    a norm of Optax's: optax.tree.norm({"w": x})
low-precision-function sqrt(x=H)
    a norm by einsum: jnp.sqrt(jnp.einsum("bd,bd->b", x, x))
    a deviation by an inner product of what is centered twice:
        x / jnp.sqrt(jnp.inner(x[0] - x[0].mean(), x[0] - x[0].mean()) / 4)
    squares that a matmul sums: x / jnp.sqrt(x * x @ jnp.ones((4, 1), F16))
low-precision-function div(x=H)
    a division by a norm by einsum: x / jnp.sqrt(jnp.einsum("bd,bd->b", x, x) + 0.001)[:, None]
    a division by a squared norm by vdot: x / jnp.vdot(x, x)
low-precision-function integer_pow(x=H)
    the reciprocal of a squared norm: x * jnp.reciprocal(jnp.vdot(x, x) + 1)
low-precision-function pow(x=H)
    a power of a squared norm: x * jnp.power(jnp.vdot(x, x) + 1, -0.5) @ x
low-precision-function log(x=H)
    the logarithm of a squared norm: x * jnp.log(jnp.vdot(x, x) + 1) @ x
low-precision-function dot_general(x=H)
    a squared norm by vdot: jnp.vdot(x, x)
    a squared norm by einsum: jnp.einsum("ij,ij->", x, x)
    squared norms of rows: jnp.einsum("bi,bi->b", x, x)
    a squared distance by vdot: jnp.vdot(x[0] - x[1], x[0] - x[1])
    a squared norm by dot: jnp.dot(x.ravel(), x.ravel())
    a squared norm by vecdot: jnp.vecdot(x, x)
low-precision-function mul(x=H)
    squares in float16 that are summed: jnp.sqrt(jnp.sum((x * x).astype(F32)))
    squares of three columns by hand: x[:, 0] * x[:, 0] + x[:, 1] * x[:, 1] + x[:, 2] * x[:, 2]
    a product of equal differences: jnp.mean((x[0] - x[1]) * (x[0] - x[1]))
low-precision-function integer_pow
    an error of Optax's: optax.l2_loss(x, x + 1).mean()
low-precision-function mul
    a variance by two means: (x * x).mean(-1) - x.mean(-1) ** 2
clean(w=W, x=X)
    a softmax in float32: product(w, jax.nn.softmax(product(w, x).astype(F32)).astype(x.dtype))
    a flow: product(w, x * jnp.exp(jnp.tanh(x)) + x)
    squares between matmuls: product(w, jax.nn.relu(product(w, x)) ** 2)
    a residual of squares: x + product(w, jax.nn.relu(product(w, x)) ** 2)
    a gate of an exponential: product(w, product(w, x) * jnp.exp(-jnp.abs(x)))
    a polynomial: product(w, product(w, x) * (1 + 0.5 * x + 0.1 * x ** 3))
    softplus before a normalization:
        h = jax.nn.softplus(product(w, x)).astype(F32)
        normal = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
        product(w, normal.astype(BF16))
    a gated linear unit:
        gate, up = jnp.split(product(w, x), 2, -1)
        (jax.nn.silu(gate) * up) @ w[1, :2].astype(BF16)
    rotary embeddings:
        q = product(w, x)
        angles = jnp.arange(4, dtype=F32)[:, None] * jnp.asarray([1.0, 0.01], F32)
        cos, sin = jnp.cos(angles).astype(BF16), jnp.sin(angles).astype(BF16)
        first, second = jnp.split(q, 2, -1)
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1) @ q.T
    rotary embeddings by complex numbers:
        q = product(w, x).astype(F32)
        turns = jnp.exp(lax.complex(jnp.zeros(4), jnp.arange(4.0)))
        turned = lax.complex(q[:, :2], q[:, 2:]) * turns[:, None]
        product(w, jnp.concatenate([turned.real, turned.imag], -1).astype(BF16))
clean(w=W, x=X, backward=False)
    a scale that is learnt as a logarithm: product(w, x) * jnp.exp(w[0, 0, 0]).astype(x.dtype)
    attention by one function: jax.nn.dot_product_attention(*[product(w, x)[None, :, None]] * 3)
    a largest number in half: product(w, x).max(-1)
clean(w=W, x=H)
    a gate of two halves of one array in float16:
        jnp.sum((product(w, x)[:, :2] * product(w, x)[:, 2:]).astype(F32))
    attention logits in float16:
        product(w, jax.nn.softmax((x @ product(w, x).T / 2).astype(F32)).astype(F16))
clean(x=shape(4, 8, dtype=F16))
    products of arrays added: x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]
clean(x=shape(8, dtype=F16), w=shape(8, dtype=F16))
    an inner product of two arrays: jnp.vdot(x, w)
low-precision-function log1p(x=X, w=X) in bfloat16, float16
    a softplus that is returned: jax.nn.softplus(x @ w)
    a loss of log_sigmoid: jax.nn.log_sigmoid(x @ w).astype(F32).mean()
    a loss of softplus, differentiated:
        jax.grad(lambda w: jax.nn.softplus(x @ w).astype(F32).sum())(w)
low-precision-function integer_pow in bfloat16, float16
    a squared error: jnp.mean((x[0] - x[1]) ** 2)
    a distance by hand: jnp.sqrt((x[0] - x[2]) ** 2 + (x[1] - x[3]) ** 2)
    squares times weights: 2 * x[0] ** 2 + 3 * x[1] ** 2
    a penalty beside a loss: jnp.mean(jnp.tanh(x) + 0.1 * x**2)
    squared magnitudes: (jnp.abs(x) ** 2).sum()
    a mean of cubes: jnp.mean(jnp.abs(x) ** 3)
    a mean of fourth powers: jnp.mean(x**4)
clean(w=W, x=X) in bfloat16, float16
    a mean of fourth powers in float32: jnp.mean(product(w, x).astype(F32) ** 4)
    a cube between matmuls: product(w, product(w, x) ** 3)
    softplus: between_matmuls(jax.nn.softplus)(w, x)
    log_sigmoid: between_matmuls(jax.nn.log_sigmoid)(w, x)
    mish: between_matmuls(jax.nn.mish)(w, x)
    silu: between_matmuls(jax.nn.silu)(w, x)
    gelu: between_matmuls(jax.nn.gelu)(w, x)
    selu: between_matmuls(jax.nn.selu)(w, x)
    celu: between_matmuls(jax.nn.celu)(w, x)
    hard_swish: between_matmuls(jax.nn.hard_swish)(w, x)
    soft_sign: between_matmuls(jax.nn.soft_sign)(w, x)
clean
    mean: jnp.mean(x)
    sum: jnp.sum(x)
    var: jnp.var(x)
    tanh: jnp.tanh(x)
    relu: jax.nn.relu(x)
    elu: jax.nn.elu(x)
    sigmoid: jax.nn.sigmoid(x)
low-precision-function rsqrt(x=H)
    a normalization in float16:
        centered = x - x.mean(-1, keepdims=True)
        centered * lax.rsqrt(jnp.mean(centered * centered, -1, keepdims=True) + 1e-3)
clean(w=W, x=H, backward=False)
    a norm by a dot with a float32 result:
        h = product(w, x)
        square = jnp.einsum("bd,bd->b", h, h, preferred_element_type=F32)
        product(w, (h.astype(F32) * lax.rsqrt(square + 1e-3)[:, None]).astype(F16))
"""
)


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
    centered = wide - wide.mean(-1, keepdims=True)
    normed = centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
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
