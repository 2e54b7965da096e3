"""Half precision that becomes float32: promotions, leaks, matmuls, casts and residuals."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    F16,
    F32,
    plant,
    planted,
    product,
)

C64 = jnp.complex64


def normalised(x):
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
    a normalisation that is not narrowed: normalised(x) @ up.astype(F32)
    probabilities that are not narrowed: jax.nn.softmax((x @ up.T).astype(F32)) @ down.astype(F32)
float32-leak dot_general(x=BF16, w=F32)
    a normalisation and weights in float32: normalised(x) @ w
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
    a normalisation that is narrowed: jax.nn.gelu(normalised(a)).astype(BF16) @ b
clean(x=X, w=X, backward=False)
    a result in float32: jnp.dot(x, w, preferred_element_type=F32)
clean(a=X, b=X, weight=shape(8, 4, dtype=F32), u=shape(1, 8, dtype=F32))
    outer products, and stored matrices times one vector:
        (a @ b, jnp.einsum("t,f->tf", jnp.arange(8.0), jnp.ones(4)), u @ weight)
cast-round-trip convert_element_type(x=F32)
    a cast there and back that loses digits: jnp.tanh(x.astype(BF16).astype(F32))
    a cast to bfloat16 through float16: jnp.tanh(x.astype(F16).astype(BF16))
    a cast to float16 through bfloat16: jnp.tanh(x.astype(BF16).reshape(2, 8).astype(F16))
    logits that were rounded before their loss: -jnp.log(x.astype(BF16).astype(F32)).mean()
cast-round-trip convert_element_type
    a cast there and back for nothing: jnp.tanh(x.astype(F32).reshape(2, 8).astype(BF16))
repeated-cast convert_element_type(x=BF16, w=F32)
    a weight that is cast twice: jnp.tanh(x @ w.astype(BF16)) @ w.astype(BF16)
    a weight that is cast for each layer: (x @ w.astype(BF16) + x) @ w.T.astype(BF16)
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
