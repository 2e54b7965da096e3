"""Constants that overflow or vanish in their dtype."""

from __future__ import annotations

from tests.policy.inspect.audit.corpus.planting import (
    plant,
)

plant(
    """
constant-out-of-range convert_element_type
    the least number of float32 in bfloat16:
        jnp.where(x > 0, x.astype(F32), jnp.finfo(F32).min).astype(x.dtype)
constant-out-of-range broadcast_in_dim(x=F16)
    an array that vanishes: x * np.full(4, 1e-9, np.float32).astype(F16)
    an array that overflows: x + np.array([1e6, 1, 2, 3], np.float32).astype(F16)
    a mask that is an array: jnp.where(x > 0, x, jnp.full(x.shape, -1e9, x.dtype))
    a mask that is a cast number: jnp.where(x > 0, x, jnp.asarray(-1e9, x.dtype))
    the first of a running maximum:
        lax.scan(lambda m, row: (jnp.maximum(m, row), None), jnp.full(4, -1e9, x.dtype),
        x)[0]
constant-out-of-range mul(x=F16)
    a mask that is a factor: x + (x > 0).astype(x.dtype) * -1e9
    a loss scale: x * 2.0 ** 16
    a rate that vanishes: x * 1e-9
constant-out-of-range add(x=F16)
    an epsilon beside a divisor: x / (jnp.abs(x) + 1e-9)
    an epsilon in a logarithm: jnp.log(x + 1e-10)
constant-out-of-range max(x=F16)
    an epsilon that limits: x / jnp.maximum(jnp.abs(x), 1e-12)
constant-out-of-range div(x=F16)
    a divisor that overflows: x / 1e5
constant-out-of-range sub(x=F16)
    a number of padding: x - 1e6
constant-out-of-range broadcast_in_dim(x=F32)
    a constant array beyond float8_e4m3fn:
        x.astype(E4M3).astype(BF16) * jnp.full(x.shape, 1000.0, E4M3).astype(BF16)
    a number that is chosen beyond float8_e5m2:
        jnp.where(x > 0, x.astype(E5M2), jnp.asarray(1e6, E5M2))
constant-out-of-range mul(x=E4M3)
    a factor beyond float8_e4m3fn: x * 1000.0
    a factor that vanishes in float8_e4m3fn: x * 0.0001
constant-out-of-range convert_element_type(x=E4M3)
    limits that are integers beyond float8_e4m3fn: jnp.clip(x, -1000, 1000)
constant-out-of-range convert_element_type(x=F32)
    a mask of -inf in a dtype without infinity: jnp.where(x > 0, x, -jnp.inf).astype(E4M3)
clean(x=F16, backward=False)
    a loss scale in float32: x.astype(F32) * 2.0 ** 16
constant-out-of-range convert_element_type(x=F16)
    a mask that is a number: jnp.where(x > 0, x, -1e9)
    a mask that is an integer: jnp.where(x > 0, x, -(10**9))
    a mask that is a sum under jit: jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1)(x)
    a mask that is a bias: x + jnp.where(x > 0, 0.0, -1e9).astype(x.dtype)
    a mask that is a product: x + ((1.0 - (x > 0).astype(F32)) * -1e9).astype(x.dtype)
    limits for NaN: jnp.nan_to_num(x, posinf=1e9)
clean
    a mask in bfloat16 that is a number: jnp.where(x > 0, x, -1e9)
    a mask in bfloat16 that is an integer: jnp.where(x > 0, x, -(10**9))
    a mask in bfloat16 that is a cast number: jnp.where(x > 0, x, jnp.asarray(-1e9, x.dtype))
    a mask in bfloat16 that is a sum under jit: jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1)(x)
clean(x=F16)
    a mask of -inf in float16: jnp.where(x > 0, x, -jnp.inf)
    a mask of -60000.0 in float16: jnp.where(x > 0, x, -6e4)
    a mask of 0.0001 in float16: jnp.where(x > 0, x, 1e-4)
    a mask of -65504.0 in float16: jnp.where(x > 0, x, float(jnp.finfo(F16).min))
    an epsilon that float16 has: x / (jnp.abs(x) + 1e-4)
    a mask in float32: jnp.where(x > 0, x.astype(F32), -1e9)
    a zero: x + 0.0
    zeros: x + np.zeros(4, np.float16)
"""
)
