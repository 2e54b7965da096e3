"""Constants that overflow or vanish in their dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.audit.finding_kinds import CONSTANT
from tests.policy.inspect.audit.corpus.planting import BF16, CAST, F16, F32, clean, faults

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

MASKS = {
    "a number": lambda x: jnp.where(x > 0, x, -1e9),
    "an integer": lambda x: jnp.where(x > 0, x, -(10**9)),
    "a cast number": lambda x: jnp.where(x > 0, x, jnp.asarray(-1e9, x.dtype)),
    "a sum under jit": jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1),
}
faults(CONSTANT, CAST, F16)(
    {f"a mask that is {name}": mask for name, mask in MASKS.items() if name != "a cast number"}
    | {
        "a mask that is a bias": lambda x: x + jnp.where(x > 0, 0.0, -1e9).astype(x.dtype),
        "a mask that is a product": lambda x: (
            x + ((1.0 - (x > 0).astype(F32)) * -1e9).astype(x.dtype)
        ),
        "limits for NaN": lambda x: jnp.nan_to_num(x, posinf=1e9),
    }
)
faults(CONSTANT, CAST)(
    {
        "the least number of float32 in bfloat16": lambda x: jnp.where(
            x > 0, x.astype(F32), jnp.finfo(F32).min
        ).astype(x.dtype)
    }
)
faults(CONSTANT, "broadcast_in_dim", F16)(
    {
        "an array that vanishes": lambda x: x * np.full(4, 1e-9, np.float32).astype(F16),
        "an array that overflows": lambda x: x + np.array([1e6, 1, 2, 3], np.float32).astype(F16),
        "a mask that is an array": lambda x: jnp.where(x > 0, x, jnp.full(x.shape, -1e9, x.dtype)),
        "a mask that is a cast number": MASKS["a cast number"],
        "the first of a running maximum": lambda x: lax.scan(
            lambda m, row: (jnp.maximum(m, row), None), jnp.full(4, -1e9, x.dtype), x
        )[0],
    }
)
faults(CONSTANT, "mul", F16)(
    {
        "a mask that is a factor": lambda x: x + (x > 0).astype(x.dtype) * -1e9,
        "a loss scale": lambda x: x * 2.0**16,
        "a rate that vanishes": lambda x: x * 1e-9,
    }
)
faults(CONSTANT, "add", F16)(
    {
        "an epsilon beside a divisor": lambda x: x / (jnp.abs(x) + 1e-9),
        "an epsilon in a logarithm": lambda x: jnp.log(x + 1e-10),
    }
)
faults(CONSTANT, "max", F16)(
    {"an epsilon that limits": lambda x: x / jnp.maximum(jnp.abs(x), 1e-12)}
)
faults(CONSTANT, "div", F16)({"a divisor that overflows": lambda x: x / 1e5})
faults(CONSTANT, "sub", F16)({"a number of padding": lambda x: x - 1e6})

# --------------------------------------------------------------------------------------------------
# 8 bits
# --------------------------------------------------------------------------------------------------

faults(CONSTANT, "broadcast_in_dim", F32)(
    {
        "a constant array beyond float8_e4m3fn": lambda x: (
            x.astype(E4M3).astype(BF16) * jnp.full(x.shape, 1000.0, E4M3).astype(BF16)
        ),
        "a number that is chosen beyond float8_e5m2": lambda x: jnp.where(
            x > 0, x.astype(E5M2), jnp.asarray(1e6, E5M2)
        ),
    }
)
faults(CONSTANT, "mul", E4M3)(
    {
        "a factor beyond float8_e4m3fn": lambda x: x * 1000.0,
        "a factor that vanishes in float8_e4m3fn": lambda x: x * 1e-4,
    }
)
faults(CONSTANT, CAST, E4M3)(
    {"limits that are integers beyond float8_e4m3fn": lambda x: jnp.clip(x, -1000, 1000)}
)
faults(CONSTANT, CAST, F32)(
    {
        "a mask of -inf in a dtype without infinity": lambda x: jnp.where(
            x > 0, x, -jnp.inf
        ).astype(E4M3)
    }
)

# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------

clean(BF16)({f"a mask in bfloat16 that is {name}": mask for name, mask in MASKS.items()})
clean(F16)(
    {
        f"a mask of {number} in float16": lambda x, number=number: jnp.where(x > 0, x, number)
        for number in (-jnp.inf, -6e4, 1e-4, float(jnp.finfo(F16).min))
    }
    | {
        "an epsilon that float16 has": lambda x: x / (jnp.abs(x) + 1e-4),
        "a mask in float32": lambda x: jnp.where(x > 0, x.astype(F32), -1e9),
        "a zero": lambda x: x + 0.0,
        "zeros": lambda x: x + np.zeros(4, np.float16),
    }
)
clean(F16, backward=False)({"a loss scale in float32": lambda x: x.astype(F32) * 2.0**16})
