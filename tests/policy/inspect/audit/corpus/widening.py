"""Half precision that meets float32 or complex numbers: promotions, leaks, float32 matmuls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from policy import full_precision
from policy.inspect.audit.finding_kinds import LEAK, MATMUL, MIXED, PROMOTION
from tests.policy.inspect.audit.corpus.functions import X
from tests.policy.inspect.audit.corpus.planting import BF16, DOT, F16, F32, clean, faults, shape

C64 = jnp.complex64

faults(PROMOTION, "add", BF16, F32)({"a bias in float32": lambda x, bias: x + bias})
faults(PROMOTION, "mul", BF16, F32)(
    {
        "a scale in float32": lambda x, scale: x * scale[0],
        "a mask in float32": lambda x, mask: x * (mask > 0).astype(F32),
    }
)
faults(PROMOTION, "sub", BF16)({"a mean in float32": lambda x: x - x.astype(F32).mean(-1)[:, None]})
faults(PROMOTION, "concatenate", BF16, F32)(
    {"parts of two dtypes": lambda x, y: jnp.concatenate([x, y])}
)
faults(PROMOTION, "select_n", F16)(
    {"the least number of float32": lambda x: jnp.where(x > 0, x, jnp.finfo(F32).min)}
)
faults(PROMOTION, "mul", BF16, C64)({"half times complex": lambda x, z: x * z})
faults(PROMOTION, "mul", F16, C64)({"the real part of a product": lambda x, z: (z * x).real})

faults(MIXED, DOT, BF16, F32)(
    {
        "a matmul of bfloat16 and float32 in lax": lambda x, w: lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32
        ).astype(BF16),
        "a matmul of bfloat16 and float32": lambda x, w: (x @ w).astype(BF16),
        "an einsum of bfloat16 and float32": lambda x, w: jnp.einsum(
            "ij,jk->ik", x, w, preferred_element_type=F32
        ),
    }
)
faults(MIXED, DOT, BF16, C64)({"a matmul of half and complex": lambda x, z: x @ z})


def normalised(x):
    """In float32, and left there."""
    wide = x.astype(F32)
    wide = wide - wide.mean(-1, keepdims=True)
    return wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)


faults(LEAK, DOT, X, X, X)(
    {
        "a mean that is taken off in float32": lambda x, up, down: (
            ((x @ up).astype(F32) - (x @ up).astype(F32).mean(-1, keepdims=True)) @ down.astype(F32)
        ).astype(BF16),
        "a normalisation that is not narrowed": lambda x, w, _: normalised(x) @ w.astype(F32),
        "probabilities that are not narrowed": lambda q, k, v: (
            jax.nn.softmax((q @ k.T).astype(F32)) @ v.astype(F32)
        ),
    }
)
faults(LEAK, DOT, BF16, F32)(
    {"a normalisation and weights in float32": lambda x, w: normalised(x) @ w}
)
faults(MATMUL, DOT, X, X, shape(4, 8, dtype=F32), shape(8, 4, dtype=F32))(
    {
        "a head in float32": lambda x, w, up, down: (x @ w, up @ down),
        "a gate in float32": lambda x, w, up, down: (x @ w) * (up @ down).astype(BF16),
    }
)
# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------

HALF, WIDE = (X, X), (shape(4, 8, dtype=F32), shape(8, 4, dtype=F32))
clean(*WIDE)({"float32 matmuls alone": lambda c, d: c @ d})
clean(shape(2, 8), WIDE[1])(
    {
        "float32 matmuls of what is widened": lambda x, w: x.astype(F32) @ w,
        "inputs that are prepared in float32": lambda x, w: (x.astype(F32) / 255.0 - 0.5) @ w,
    }
)
clean(*HALF)(
    {
        "an island of float32": lambda a, b: (
            full_precision(lambda a, b: a.astype(F32) @ b.astype(F32))(a, b).astype(BF16) @ b
        ),
        "a normalisation that is narrowed": lambda x, w: (
            jax.nn.gelu(normalised(x)).astype(BF16) @ w
        ),
    }
)
clean(*HALF, backward=False)(
    {"a result in float32": lambda x, w: jnp.dot(x, w, preferred_element_type=F32)}
)
clean(*HALF, shape(8, 4, dtype=F32), shape(1, 8, dtype=F32))(
    {
        "outer products, and stored matrices times one vector": lambda a, b, weight, u: (
            a @ b,
            jnp.einsum("t,f->tf", jnp.arange(8.0), jnp.ones(4)),
            u @ weight,
        )
    }
)
