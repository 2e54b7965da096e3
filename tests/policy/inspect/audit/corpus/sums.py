"""Sums in half precision, and half precision that becomes float32: promotions, leaks, matmuls and
residuals.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    F16,
    F32,
    I32,
    plant,
    planted,
    product,
    shape,
)

ZERO, ONE = np.zeros((), BF16), np.ones((), BF16)
INDICES = shape(4, dtype=I32)


ON_DEVICES = ("vmap", "while", "cond", "shard_map", "custom", "a gradient", "step", "linen", "nnx")
ROWS = {"x": shape(16, 4), "never": ON_DEVICES}
ONWARD = [(i, (i + 1) % 4) for i in range(4)]


def on_four_devices(local: Any) -> Any:
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _in_a_loop(x: Any) -> Any:
    def turn(_, state):
        total, passed = state
        passed = lax.ppermute(passed, "i", ONWARD)
        return total + passed, passed

    return lax.fori_loop(0, 3, turn, (x, x))[0]


def _passed_on_in_a_loop(x: Any) -> Any:
    return lax.fori_loop(
        0, 4, lambda i, total: lax.ppermute(total, "i", ONWARD) + x[i], jnp.zeros(4, x.dtype)
    )


def layer(w: Any, x: Any, i: int) -> Any:
    return jnp.tanh(product(w, x, i))


@planted("clean(w=W, x=X)")
def _neighbors_of_a_ring(w, x):
    def local(h):
        left = lax.ppermute(h, "i", ONWARD)
        right = lax.ppermute(h, "i", [(j, i) for i, j in ONWARD])
        return (left + h + right) / 3

    return on_four_devices(local)(product(w, x))


plant(
    """
low-precision-reduction reduce_window_sum
    an average pool: lax.reduce_window(x, ZERO, lax.add, (2, 2), (1, 1), "VALID") / 4
    an average pool of Flax's: nn.avg_pool(x[None, :, :, None], (2, 2), (2, 2))
low-precision-reduction cumsum
    a cumulative sum: lax.cumsum(x, 1)
    a cumulative sum of jnp's: jnp.cumsum(x, -1)
    cumulative log decays: jnp.tanh(jnp.cumsum(x, 0)) @ x
low-precision-reduction cumprod
    a cumulative product: jnp.cumprod(x, -1)
low-precision-reduction cumlogsumexp
    a cumulative logsumexp: lax.cumlogsumexp(x)
low-precision-reduction reduce_sum
    a sum of lax: lax.reduce(x, ZERO, lax.add, (1,))
    the gradient of a scale: jax.grad(lambda g: (x * g).astype(F32).sum())(x[0])
    the gradient of repeated rows:
        jax.grad(lambda x: jnp.tanh(jnp.repeat(x, 4, 0)).astype(F32).sum())(x)
    the gradient of shared keys:
        jax.grad(lambda x: jnp.tanh(jnp.broadcast_to(x[:, None], (4, 6, 4))).astype(F32).sum())(x)
low-precision-reduction reduce_prod
    a product of lax: lax.reduce(x, ONE, lax.mul, (1,))
low-precision-reduction reduce
    a sum by a function: lax.reduce(x, ZERO, lambda a, b: a + b * 1, (1,))
low-precision-reduction psum
    a mean over a mapped axis: jax.vmap(lambda row: lax.pmean(row, "i"), axis_name="i")(x)
low-precision-reduction scatter-add(x=X, i=INDICES)
    sums of segments: jax.ops.segment_sum(x, i, 3)
    a weighted histogram: jnp.bincount(i, weights=x[:, 0], length=5)
    rows that are added: jnp.zeros_like(x).at[i].add(x)
    a histogram in half: jnp.zeros(5, x.dtype).at[i].add(1)
low-precision-reduction scatter-mul(x=X, i=INDICES)
    rows that are multiplied: jnp.ones_like(x).at[i].multiply(x)
low-precision-reduction scatter-add(backward=True)
    the gradient of the largest numbers: jnp.tanh(lax.top_k(x, 2)[0])
    the gradient of a lookup along an axis:
        jnp.tanh(jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True) * jnp.ones((1, 3), I32),
        -1))
low-precision-reduction reduce_sum(backward=True)
    the gradient of a bias: jnp.tanh(x[:1] + jnp.zeros((8, 4), BF16)) * 0.5
low-precision-reduction select_and_scatter_add(x=shape(8, 8), backward=True)
    the gradient of a max pool that overlaps: nn.max_pool(x[None, :, :, None], (4, 4), (1, 1))
clean(w=W, x=X)
    a sum in float32: product(w, x).astype(F32).sum(-1)
    a cumulative sum in float32: lax.cumsum(product(w, x).astype(F32), 1).astype(x.dtype)
    a mean over devices in float32:
        jax.vmap(lambda row: lax.pmean(row.astype(F32), "i"), axis_name="i")(product(w, x))
    rows that are set: x.at[jnp.arange(2)].set(product(w, x)[:2])
    rows that are added to places of their own: x.at[jnp.arange(3)].add(product(w, x)[:3])
    a largest number: lax.reduce_window(product(w, x), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    embeddings of three kinds: (w[1].astype(BF16) + w[2].astype(BF16) + x) @ w[0].astype(BF16)
    a mean of two heads: (layer(w, x, 0) + layer(w, x, 1)) / 2
    a stack of residual blocks:
        for i in range(12):
            x = x + layer(w, x, i)
        x
    parallel branches of a block:
        for i in range(4):
            x = x + layer(w, x, i) + jax.nn.gelu(product(w, x, i + 4))
        x
    a convolution with three taps:
        h = jnp.pad(product(w, x), ((1, 1), (0, 0)))
        h[:-2] + h[1:-1] + h[2:]
narrowed-carry scan(**ROWS)
    an all-reduce in a loop: on_four_devices(_in_a_loop)(x)
    a sum that a loop passes on: on_four_devices(_passed_on_in_a_loop)(x)
low-precision-reduction psum(**ROWS)
    a sum over devices: on_four_devices(lambda x: lax.psum(x, "i"))(x)
low-precision-reduction reduce_scatter(**ROWS)
    a sum over devices that is scattered:
        on_four_devices(lambda x: lax.psum_scatter(x, "i", tiled=True))(x)
low-precision-reduction scatter-add(table=BF16, backward=True)
    the gradient of a lookup:
        tokens = jnp.zeros((2, 3), I32) + jnp.argmax(table[0]).astype(I32)
        jnp.tanh(table[tokens])
clean(w=W, x=X, backward=False)
    a mixture of four experts:
        gates = jax.nn.softmax(product(w, x).astype(F32)).astype(BF16)
        sum(gates[:, i, None] * layer(w, x, i + 1) for i in range(4))
"""
)


C64 = jnp.complex64


def normalized(x):
    """In float32, and left there."""
    wide = x.astype(F32)
    wide = wide - wide.mean(-1, keepdims=True)
    return wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)


@planted("clean(w=W, x=H)")
def _float16_that_is_handed_to_bfloat16(w, x):
    def first(w, x):
        return (product(w, x).astype(F32) * 2).astype(F16)

    def second(w, x):
        return product(w, jnp.tanh(x.astype(BF16)), 1)

    return second(w, first(w, x))


def in_float32(function: Any) -> Any:
    return lambda h: function(h.astype(F32)).astype(h.dtype)


plant(
    """
silent-promotion add(x=BF16, bias=F32)
    a bias in float32: x + bias
silent-promotion mul(x=BF16, scale=F32)
    a scale in float32: x * scale[0]
    a mask in float32: x * (scale > 0).astype(F32)
silent-promotion sub(x=BF16)
    a mean in float32: x - x.astype(F32).mean(-1)[:, None]
silent-promotion concatenate(x=BF16, y=F32)
    parts of two dtypes: jnp.concatenate([x, y])
silent-promotion select_n(x=F16)
    the least number of float32: jnp.where(x > 0, x, jnp.finfo(F32).min)
silent-promotion mul(x=BF16, z=C64)
    half times complex: x * z
silent-promotion mul(x=F16, z=C64)
    the real part of a product: (z * x).real
mixed-matmul dot_general(x=BF16, w=F32)
    a matmul of bfloat16 and float32 in lax:
        lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32).astype(BF16)
    a matmul of bfloat16 and float32: (x @ w).astype(BF16)
    an einsum of bfloat16 and float32: jnp.einsum("ij,jk->ik", x, w, preferred_element_type=F32)
mixed-matmul dot_general(x=BF16, z=C64)
    a matmul of half and complex: x @ z
float32-leak dot_general(x=X, up=X, down=X)
    a mean that is taken off in float32:
        (((x @ up).astype(F32) - (x @ up).astype(F32).mean(-1, keepdims=True)) @
        down.astype(F32)).astype(BF16)
    a normalization that is not narrowed: normalized(x) @ up.astype(F32)
    probabilities that are not narrowed: jax.nn.softmax((x @ up.T).astype(F32)) @ down.astype(F32)
float32-leak dot_general(x=BF16, w=F32)
    a normalization and weights in float32: normalized(x) @ w
float32-matmul dot_general(x=X, w=X, up=shape(4, 8, dtype=F32), down=shape(8, 4, dtype=F32))
    a head in float32: (x @ w, up @ down)
    a gate in float32: x @ w * (up @ down).astype(BF16)
clean(c=shape(4, 8, dtype=F32), d=shape(8, 4, dtype=F32))
    float32 matmuls alone: c @ d
clean(x=shape(2, 8), w=shape(8, 4, dtype=F32))
    float32 matmuls of what is widened: x.astype(F32) @ w
    inputs that are prepared in float32: (x.astype(F32) / 255.0 - 0.5) @ w
clean(a=X, b=X)
    an island of float32:
        policy.full_precision(lambda a, b: a.astype(F32) @ b.astype(F32))(a, b).astype(BF16) @ b
    a normalization that is narrowed: jax.nn.gelu(normalized(a)).astype(BF16) @ b
clean(x=X, w=X, backward=False)
    a result in float32: jnp.dot(x, w, preferred_element_type=F32)
clean(a=X, b=X, weight=shape(8, 4, dtype=F32), u=shape(1, 8, dtype=F32))
    outer products, and stored matrices times one vector:
        (a @ b, jnp.einsum("t,f->tf", jnp.arange(8.0), jnp.ones(4)), u @ weight)
clean(x=BF16, w=F32)
    a weight that is cast once: x @ w.astype(BF16)
    a result that is returned wide: (x @ w.astype(BF16)).astype(F32)
float32-residual any(w=W, x=X, backward=True, never=("remat", "step", "a gradient", "cond"))
    a tanh in float32: between_matmuls(in_float32(jnp.tanh))(w, x)
    a gelu in float32: between_matmuls(in_float32(jax.nn.gelu))(w, x)
    a sigmoid in float32: between_matmuls(in_float32(jax.nn.sigmoid))(w, x)
    a product with itself in float32: between_matmuls(in_float32(lambda h: h * jnp.tanh(h)))(w, x)
    a tanh of every layer in float32:
        lax.scan(lambda h, _: (in_float32(jnp.tanh)(product(w, h)), None), x, None, length=5)[0]
clean(w=W, x=X)
    a tanh in half between matmuls: between_matmuls(jnp.tanh)(w, x)
    a softmax in float32 between matmuls: between_matmuls(in_float32(jax.nn.softmax))(w, x)
    a mean in float32 between matmuls:
        between_matmuls(in_float32(lambda h: h - h.mean(-1, keepdims=True)))(w, x)
    a norm in float32 between matmuls:
        between_matmuls(in_float32(
            lambda h: h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)))(w, x)
    an exponential in float32 between matmuls: between_matmuls(in_float32(jax.nn.softplus))(w, x)
    a tanh in float32 that is computed again between matmuls:
        between_matmuls(jax.checkpoint(in_float32(jnp.tanh)))(w, x)
    a program that multiplies in float32: jnp.tanh(x.astype(F32) @ w[0]).sum()
clean(x=W, w=H)
    cubes in float32 of float16: between_matmuls(in_float32(jax.nn.gelu))(x, w)
clean(x=BF16, w=F32, backward=False)
    a weight that is cast once and used twice:
        w = w.astype(BF16)
        jnp.tanh(x @ w) @ w
"""
)
