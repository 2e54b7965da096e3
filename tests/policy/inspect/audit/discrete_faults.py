"""Integers, choices and draws that half precision changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import CHOICE, DRAW, FUNCTION, INTEGER
from tests.policy.inspect.audit.faults import BF16, F16, F32, fault

MANY = 3000  # more than float16 tells apart

# --------------------------------------------------------------------------------------------------
# Integers
# --------------------------------------------------------------------------------------------------


def positions(dtype: Any, many: int = MANY) -> Any:
    return jnp.arange(many).astype(dtype)


def distances() -> Any:
    return jnp.arange(MANY)[:, None] - jnp.arange(8)[None]


def flag(x: Any) -> Any:
    """Returns booleans of `MANY` columns."""
    return jnp.tile(x, (1, MANY // 4)) > 0


for _dtype in (BF16, F16):
    _name = jnp.dtype(_dtype).name
    fault(f"positions in {_name}", INTEGER, "convert_element_type", _dtype)(
        lambda x: x[:, :1] * positions(x.dtype)[None]
    )
    fault(f"a count in {_name}", INTEGER, "convert_element_type", _dtype)(
        lambda x: x[:, 0] / flag(x).sum(-1).astype(x.dtype)
    )
fault("an iota in bfloat16", INTEGER, "iota")(
    lambda x: x[:, :1] + jnp.arange(MANY, dtype=x.dtype)[None]
)
fault("evenly spaced numbers in float16", INTEGER, "iota", F16)(
    lambda x: x[:, :1] * jnp.linspace(0, 1, MANY, dtype=x.dtype)[None]
)
fault("distances times a slope, as in ALiBi", INTEGER, "convert_element_type")(
    lambda x: (
        x[0, 0]
        - (0.25 * (jnp.arange(MANY)[:, None] - jnp.arange(8)[None]).astype(F32)).astype(x.dtype)
    )
)
fault("positions of a mask by its running sum", INTEGER, "convert_element_type")(
    lambda x: jnp.cumsum(flag(x), -1).astype(x.dtype) + x[:, :1]
)
fault("an index of a vocabulary", INTEGER, "convert_element_type")(
    lambda x: jnp.argmax(jnp.tile(x, (1, MANY)), -1).astype(x.dtype)
)
fault("positions that were float32 before", INTEGER, "convert_element_type")(
    lambda x: (jnp.arange(MANY, dtype=F32) + 1).astype(x.dtype) * x[0, 0]
)


@fault("positions behind an offset of a cache", INTEGER, "convert_element_type")
def _offset(x: Any) -> Any:
    start = jnp.argmax(x[0])
    return x[0, 0] * (start + jnp.arange(MANY)).astype(x.dtype)


# --------------------------------------------------------------------------------------------------
# Choices
# --------------------------------------------------------------------------------------------------

fault("the largest of rounded logits", CHOICE, "argmax", F32)(lambda x: jnp.argmax(x.astype(BF16)))
fault("the best of rounded scores", CHOICE, "top_k", F32)(lambda x: lax.top_k(x.astype(F16), 2)[1])
fault("the order of rounded scores", CHOICE, "sort", F32)(lambda x: jnp.argsort(x.astype(BF16)))


# --------------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------------

KEY = jax.random.key(0)

fault("a rare event drawn in bfloat16", DRAW, "lt")(
    lambda x: jnp.where(jax.random.uniform(KEY, x.shape, x.dtype) < 0.001, 0, x)
)
fault("an almost sure event drawn in float16", DRAW, "lt", F16)(
    lambda x: jnp.where(jax.random.uniform(KEY, x.shape, x.dtype) < 0.9995, x, 0)
)
fault("bernoulli of a half probability", DRAW, "lt")(
    lambda x: jnp.where(jax.random.bernoulli(KEY, jnp.asarray(0.002, x.dtype), x.shape), x, 0)
)


# --------------------------------------------------------------------------------------------------
# Functions whose results are added by hand
# --------------------------------------------------------------------------------------------------

fault("a softmax of two logits by hand", FUNCTION, "exp")(
    lambda x: jnp.exp(x[0]) / (jnp.exp(x[0]) + jnp.exp(x[1]))
)
fault("squares of three columns by hand", FUNCTION, "mul", F16)(
    lambda x: x[:, 0] * x[:, 0] + x[:, 1] * x[:, 1] + x[:, 2] * x[:, 2]
)
fault("a squared norm by vdot", FUNCTION, "dot_general", F16)(lambda x: jnp.vdot(x, x))
