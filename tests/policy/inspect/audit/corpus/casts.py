"""Casts that undo each other, round twice or are repeated."""

from __future__ import annotations

import jax.numpy as jnp

from policy.inspect.audit.finding_kinds import REPEATED, ROUND_TRIP
from tests.policy.inspect.audit.corpus.functions import H, W, product
from tests.policy.inspect.audit.corpus.planting import BF16, CAST, F16, F32, clean, faults

faults(ROUND_TRIP, CAST, F32)(
    {
        "a cast there and back that loses digits": lambda x: jnp.tanh(x.astype(BF16).astype(F32)),
        "a cast to bfloat16 through float16": lambda x: jnp.tanh(x.astype(F16).astype(BF16)),
        "a cast to float16 through bfloat16": lambda x: jnp.tanh(
            x.astype(BF16).reshape(2, 8).astype(F16)
        ),
        "logits that were rounded before their loss": lambda x: (
            -jnp.log(x.astype(BF16).astype(F32)).mean()
        ),
    }
)
faults(ROUND_TRIP, CAST)(
    {
        "a cast there and back for nothing": lambda x: jnp.tanh(
            x.astype(F32).reshape(2, 8).astype(BF16)
        )
    }
)
faults(REPEATED, CAST, BF16, F32)(
    {
        "a weight that is cast twice": lambda x, w: jnp.tanh(x @ w.astype(BF16)) @ w.astype(BF16),
        "a weight that is cast for each layer": lambda x, w: (
            (x @ w.astype(BF16) + x) @ w.T.astype(BF16)
        ),
    }
)


@clean(W, H)
def _float16_that_is_handed_to_bfloat16(w, x):
    def first(w, x):
        return (product(w, x).astype(F32) * 2).astype(F16)

    def second(w, x):
        return product(w, jnp.tanh(x.astype(BF16)), 1)

    return second(w, first(w, x))


clean(BF16, F32)(
    {
        "a weight that is cast once": lambda x, w: x @ w.astype(BF16),
        "a result that is returned wide": lambda x, w: (x @ w.astype(BF16)).astype(F32),
    }
)


@clean(BF16, F32, backward=False)
def _a_weight_that_is_cast_once_and_used_twice(x, w):
    w = w.astype(BF16)
    return jnp.tanh(x @ w) @ w
