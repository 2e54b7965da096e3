"""Numbers beyond what a half or an 8-bit dtype holds: norms by dots, casts on the way, constants;
and complex ones.
"""

from __future__ import annotations

import jax.numpy as jnp

from policy.inspect.audit.finding_kinds import CONSTANT, FUNCTION, MIXED, PROMOTION, ROUND_TRIP
from tests.policy.inspect.audit.faults import BF16, F16, F32, fault

E4M3, E5M2, C64 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64

# --------------------------------------------------------------------------------------------------
# Norms and variances by dots
# --------------------------------------------------------------------------------------------------


fault("a norm by einsum", FUNCTION, "sqrt", F16)(lambda x: jnp.sqrt(jnp.einsum("bd,bd->b", x, x)))
fault("a division by a norm by einsum", FUNCTION, "div", F16)(
    lambda x: x / jnp.sqrt(jnp.einsum("bd,bd->b", x, x) + 1e-3)[:, None]
)
fault("a division by a squared norm by vdot", FUNCTION, "div", F16)(lambda x: x / jnp.vdot(x, x))
fault("the reciprocal of a squared norm", FUNCTION, "integer_pow", F16)(
    lambda x: x * jnp.reciprocal(jnp.vdot(x, x) + 1)
)
fault("a power of a squared norm", FUNCTION, "pow", F16)(
    lambda x: (x * jnp.power(jnp.vdot(x, x) + 1, -0.5)) @ x
)
fault("the logarithm of a squared norm", FUNCTION, "log", F16)(
    lambda x: (x * jnp.log(jnp.vdot(x, x) + 1)) @ x
)


@fault("a deviation by an inner product of what is centred twice", FUNCTION, "sqrt", F16)
def _deviation(x):
    row = x[0]
    return x / jnp.sqrt(jnp.inner(row - row.mean(), row - row.mean()) / 4)


fault("squares that a matmul sums", FUNCTION, "sqrt", F16)(
    lambda x: x / jnp.sqrt((x * x) @ jnp.ones((4, 1), F16))
)


# --------------------------------------------------------------------------------------------------
# Casts on the way
# --------------------------------------------------------------------------------------------------


fault("a cast to bfloat16 through float16", ROUND_TRIP, "convert_element_type", F32)(
    lambda x: jnp.tanh(x.astype(F16).astype(BF16))
)
fault("a cast to float16 through bfloat16", ROUND_TRIP, "convert_element_type", F32)(
    lambda x: jnp.tanh(x.astype(BF16).reshape(2, 8).astype(F16))
)


# --------------------------------------------------------------------------------------------------
# Constants in 8 bits
# --------------------------------------------------------------------------------------------------


fault("a constant array beyond float8_e4m3fn", CONSTANT, "broadcast_in_dim", F32)(
    lambda x: x.astype(E4M3).astype(BF16) * jnp.full(x.shape, 1000.0, E4M3).astype(BF16)
)
fault("a number that is chosen beyond float8_e5m2", CONSTANT, "broadcast_in_dim", F32)(
    lambda x: jnp.where(x > 0, x.astype(E5M2), jnp.asarray(1e6, E5M2))
)
fault("a factor beyond float8_e4m3fn", CONSTANT, "mul", E4M3)(lambda x: x * 1000.0)
fault("a factor that vanishes in float8_e4m3fn", CONSTANT, "mul", E4M3)(lambda x: x * 1e-4)
fault("limits that are integers beyond float8_e4m3fn", CONSTANT, "convert_element_type", E4M3)(
    lambda x: jnp.clip(x, -1000, 1000)
)
fault("a mask of -inf in a dtype without infinity", CONSTANT, "convert_element_type", F32)(
    lambda x: jnp.where(x > 0, x, -jnp.inf).astype(E4M3)
)


# --------------------------------------------------------------------------------------------------
# Complex
# --------------------------------------------------------------------------------------------------


fault("half times complex", PROMOTION, "mul", BF16, C64, mixes=True)(lambda x, z: x * z)
fault(
    "half times a complex number, of which the real part goes on",
    PROMOTION,
    "mul",
    F16,
    C64,
    mixes=True,
)(lambda x, z: (z * x).real)
fault("a matmul of half and complex", MIXED, "dot_general", BF16, C64, mixes=True)(
    lambda x, z: x @ z
)
