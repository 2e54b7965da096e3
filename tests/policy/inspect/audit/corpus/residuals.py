"""Arrays that the forward pass keeps in float32 for the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import RESIDUAL
from tests.policy.inspect.audit.corpus.functions import H, W, X, between_matmuls, product
from tests.policy.inspect.audit.corpus.planting import F32, clean, faults


def in_float32(function: Any) -> Any:
    return lambda h: function(h.astype(F32)).astype(h.dtype)


faults(RESIDUAL, "", W, X, backward=True, never=("remat", "step", "a gradient", "cond"))(
    {
        f"a {name} in float32": between_matmuls(in_float32(function))
        for name, function in {
            "tanh": jnp.tanh,
            "gelu": jax.nn.gelu,
            "sigmoid": jax.nn.sigmoid,
            "product with itself": lambda h: h * jnp.tanh(h),
        }.items()
    }
    | {
        "a tanh of every layer in float32": lambda w, x: lax.scan(
            lambda h, _: (in_float32(jnp.tanh)(product(w, h)), None), x, None, length=5
        )[0]
    }
)

clean(W, X)(
    {
        f"{name} between matmuls": between_matmuls(function)
        for name, function in {
            "a tanh in half": jnp.tanh,
            "a softmax in float32": in_float32(jax.nn.softmax),
            "a mean in float32": in_float32(lambda h: h - h.mean(-1, keepdims=True)),
            "a norm in float32": in_float32(
                lambda h: h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
            ),
            "an exponential in float32": in_float32(jax.nn.softplus),
            "a tanh in float32 that is computed again": jax.checkpoint(in_float32(jnp.tanh)),
        }.items()
    }
    | {"a program that multiplies in float32": lambda w, x: jnp.tanh(x.astype(F32) @ w[0]).sum()}
)
clean(W, H)({"cubes in float32 of float16": between_matmuls(in_float32(jax.nn.gelu))})
