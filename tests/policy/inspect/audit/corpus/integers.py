"""Integers in half precision, more than it tells apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.audit.finding_kinds import INTEGER
from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    CAST,
    F16,
    F32,
    I32,
    clean,
    faults,
    shape,
)

MANY = 3000  # more than float16 tells apart
KEY = jax.random.key(0)
WIDE = shape(4, MANY)


def positions(dtype: Any = BF16, many: int = MANY) -> Any:
    return jnp.arange(many).astype(dtype)


def distances() -> Any:
    return jnp.arange(MANY)[:, None] - jnp.arange(8)[None]


for _dtype in (BF16, F16):
    _name = jnp.dtype(_dtype).name
    faults(INTEGER, CAST, shape(4, MANY, dtype=_dtype))(
        {
            f"positions in {_name}": lambda x: x * positions(x.dtype),
            f"a count in {_name}": lambda x: x[:, 0] / (x > 0).sum(-1).astype(x.dtype),
            f"timesteps drawn in {_name}": lambda x: (
                x * jax.random.randint(KEY, (4, 1), 0, 4000).astype(x.dtype)
            ),
        }
    )
    faults(INTEGER, "iota", shape(4, MANY, dtype=_dtype))(
        {
            f"an iota in {_name}": lambda x: x + jnp.arange(MANY, dtype=x.dtype),
            f"evenly spaced numbers in {_name}": lambda x: (
                x * jnp.linspace(0, 1, MANY, dtype=x.dtype)
            ),
        }
    )

faults(INTEGER, CAST)(
    {
        "positions that were float32 before": lambda x: (
            (jnp.arange(MANY, dtype=F32) + 1).astype(x.dtype) * x[0, 0]
        ),
        "positions behind an offset of a cache": lambda x: (
            x[0, 0] * (jnp.argmax(x[0]) + jnp.arange(MANY)).astype(x.dtype)
        ),
        "distances": lambda x: distances().astype(x.dtype) * x[0, 0],
        "distances times a slope, as in ALiBi": lambda x: (
            x[0, 0] - (0.25 * distances().astype(F32)).astype(x.dtype)
        ),
        "distances times slopes that are computed": lambda x: (
            x[0, 0] - (jnp.exp2(-jnp.arange(1, 9.0)) * distances()).astype(x.dtype)
        ),
        "an index of two small ones": lambda x: (
            (jnp.arange(64)[:, None] * 64 + jnp.arange(64)).astype(x.dtype) * x[0, 0]
        ),
        "coordinates of a grid": lambda x: jnp.indices((512, 4)).astype(x.dtype) * x[0, 0],
        "coordinates that are normalised": lambda x: (
            ((jnp.arange(1024) + 0.5) / 1024).astype(x.dtype) * x[0, 0]
        ),
        "evenly spaced numbers that are cast": lambda x: (
            jnp.linspace(-1, 1, 1024).astype(x.dtype) * x[0, 0]
        ),
        "a permutation": lambda x: jax.random.permutation(KEY, 1000).astype(x.dtype) * x[0, 0],
        "a choice of a thousand": lambda x: (
            x * jax.random.choice(KEY, 1000, (4, 4)).astype(x.dtype)
        ),
        "a category of a thousand": lambda x: (
            jax.random.categorical(KEY, jnp.zeros((4, 4, 1000))).astype(x.dtype) * x
        ),
        "the counter of a loop": lambda x: lax.fori_loop(
            0, 1000, lambda i, h: jnp.tanh(h * i.astype(h.dtype)), x
        ),
        "the numbers of a loop's rows": lambda x: lax.scan(
            lambda h, i: (jnp.tanh(h * i.astype(h.dtype)), None), x, jnp.arange(1000)
        )[0],
        "numbers that are captured": lambda x: jnp.asarray(np.arange(1000)).astype(BF16) * x[0, 0],
        "the running sum of ones": lambda x: (
            jnp.cumsum(jnp.ones(1000, I32)).astype(x.dtype) * x[0, 0]
        ),
        "an index of a device": lambda x: jax.vmap(
            lambda row: row * lax.axis_index("i").astype(row.dtype), axis_name="i"
        )(jnp.tile(x, (250, 1))),
    }
)
faults(INTEGER, CAST, WIDE)(
    {
        "positions of a mask by its running sum": lambda x: jnp.cumsum(x > 0, -1).astype(x.dtype),
        "an index of a vocabulary": lambda x: jnp.argmax(x, -1).astype(x.dtype),
        "indices of the largest": lambda x: lax.top_k(x, 2)[1].astype(x.dtype),
        "ranks": lambda x: jnp.argsort(jnp.argsort(x[0])).astype(x.dtype),
        "places that are not zero": lambda x: jnp.nonzero(x[0] > 0, size=1000)[0].astype(x.dtype),
        "a count of what is not zero": lambda x: x[:, 0] / jnp.count_nonzero(x, -1).astype(x.dtype),
        "a quotient by a count that a norm uses": lambda x: (
            x / (x > 0).sum(-1, keepdims=True, dtype=F32).astype(x.dtype)
        ),
    }
)
faults(INTEGER, CAST, shape(4, MANY, dtype=I32))(
    {
        "positions of a mask of integers": lambda mask: (jnp.cumsum(mask, -1) - 1).astype(BF16),
        "a number of tokens that a mask has": lambda mask: mask.sum().astype(BF16),
        "a histogram": lambda x: jnp.bincount(x[0], length=8).astype(BF16),
        "lengths of segments": lambda x: jax.ops.segment_sum(jnp.ones(MANY, I32), x[0], 8).astype(
            BF16
        ),
        "a remainder": lambda x: (x % 1000).astype(BF16),
        "integers within limits": lambda x: jnp.clip(x, 0, 1000).astype(BF16),
    }
)
faults(INTEGER, CAST, WIDE, shape(MANY))(
    {"a place in a sorted array": lambda x, edges: jnp.searchsorted(edges, x[0]).astype(BF16)}
)

clean(shape(4, 1), backward=False)(
    {
        "positions in float32": lambda x: (x.astype(F32) * positions(F32)).astype(BF16),
        "few positions": lambda x: x * positions(BF16, 256),
        "a size that bfloat16 has not": lambda x: x * 513,
        "positions modulo a small size": lambda x: x * (jnp.arange(MANY) % 16).astype(BF16),
        "positions in blocks": lambda x: x * (jnp.arange(MANY) // 16).astype(BF16),
        "positions that are clipped": lambda x: x * jnp.clip(jnp.arange(MANY), 0, 128).astype(BF16),
        "the first of many positions": lambda x: x * jnp.arange(MANY)[:128].astype(BF16),
        "multiples of a power of two": lambda x: x * (jnp.arange(200) * 64).astype(BF16),
        "angles in float32": lambda x: (
            x * jnp.cos(positions(F32)[:, None] * jnp.exp(-jnp.arange(4.0))).astype(BF16)[:, 0]
        ),
        "the reciprocals of positions": lambda x: x * (1 / (positions(F32) + 1)).astype(BF16),
        "decays by distance": lambda x: x * jnp.exp(-0.1 * positions(F32)).astype(BF16),
        "buckets of distances": lambda x: x * jnp.log2(1 + positions(F32)).astype(I32).astype(BF16),
        "a few draws": lambda x: x * jax.random.randint(KEY, (4, 1), 0, 200).astype(BF16),
        "few turns of a loop": lambda x: lax.fori_loop(
            0, 100, lambda i, h: jnp.tanh(h * i.astype(h.dtype)), x
        ),
        "an index into a table": lambda x: (
            jnp.take(jnp.ones((MANY, 4), BF16), jnp.arange(MANY)[:8], axis=0) * x[0]
        ),
    }
)
clean(shape(4, 1, dtype=F16), backward=False)(
    {"positions that float16 has": lambda x: x * positions(F16, 2048)}
)
clean(WIDE, backward=False)(
    {
        "a mask as numbers": lambda x: x * (x > 0).astype(BF16),
        "a mask of a large number": lambda x: jnp.where(x > 0, x, -1e9).astype(BF16),
        "a causal mask": lambda x: jnp.where(jnp.arange(MANY) <= 7, x, -jnp.inf),
        "a mean by a count in float32": lambda x: (x.astype(F32).sum(-1) / (x > 0).sum(-1)).astype(
            BF16
        ),
        "a count of few": lambda x: x[:, 0] / (x[:, :128] > 0).sum(-1).astype(BF16),
    }
)
clean(shape(4, MANY, dtype=F32), backward=False)(
    {
        "activations times positions": lambda x: (x * positions(F32)).astype(BF16),
        "deep activations times positions": lambda x: (_deep(x) * positions(F32)).astype(BF16),
    }
)
clean(shape(4, MANY, dtype=jnp.uint8), backward=False)(
    {"bytes of an image": lambda x: x.astype(BF16) / 255}
)
clean(shape(MANY, dtype=I32), backward=False)(
    {
        "labels that are not known": lambda x: x.astype(BF16),
        "one hot of many classes": lambda x: jax.nn.one_hot(x[:8], MANY, dtype=BF16),
    }
)


def _deep(x: Any) -> Any:
    for _ in range(40):
        x = jnp.tanh(x) + jnp.sin(x)
    return x
