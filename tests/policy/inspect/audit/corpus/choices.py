"""Choices of the largest among numbers that were rounded to half precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from policy.inspect.audit.finding_kinds import CHOICE
from tests.policy.inspect.audit.corpus.planting import BF16, F16, F32, I32, clean, faults, shape

KEY = jax.random.key(0)
X = shape(4, 8, dtype=F32)

faults(CHOICE, "argmax", X)(
    {
        "the largest of rounded logits": lambda x: jnp.argmax(x.astype(BF16), -1),
        "the largest of rounded logits by a temperature": lambda x: jnp.argmax(
            x.astype(BF16) / 0.7, -1
        ),
        "the largest of rounded logits behind a mask": lambda x: jnp.argmax(
            jnp.where(x > 0, x.astype(BF16), -jnp.inf), -1
        ),
        "the largest of rounded probabilities": lambda x: jnp.argmax(
            jax.nn.softmax(x).astype(BF16), -1
        ),
        "the largest of rounded logits with noise": lambda x: jnp.argmax(
            jnp.tanh(x).astype(F16) + 0.1 * jax.random.normal(KEY, x.shape, F16), -1
        ),
        "a category of rounded logits": lambda x: jax.random.categorical(
            KEY, jnp.tanh(x).astype(BF16)
        ),
        "greedy decoding of rounded rows": lambda x: lax.scan(
            lambda n, row: (n, jnp.argmax(row.astype(BF16))), 0, x
        )[1],
    }
)
faults(CHOICE, "argmin", X, X)(
    {
        "the nearest code by rounded distances": lambda x, codes: jnp.argmin(
            jnp.square(x[:, None] - codes).sum(-1).astype(BF16), -1
        )
    }
)
faults(CHOICE, "top_k", X)(
    {
        "the best of rounded scores": lambda x: lax.top_k(x.astype(F16), 2)[1],
        "beams of rounded scores": lambda x: lax.top_k(x.astype(BF16).reshape(-1), 2)[1],
        "the smallest of rounded scores": lambda x: lax.top_k(-x.astype(BF16), 2)[1],
    }
)
faults(CHOICE, "top_k", shape(4, 8), shape(8, 6), shape(6))(
    {
        "experts by rounded gates": lambda x, w, _: lax.top_k(
            jax.nn.softmax(jnp.dot(x, w, preferred_element_type=F32)).astype(x.dtype), 2
        ),
        "experts by rounded gates and a bias": lambda x, w, bias: lax.top_k(
            jax.nn.sigmoid(jnp.dot(x, w, preferred_element_type=F32)).astype(x.dtype) + bias, 2
        )[1],
    }
)
faults(CHOICE, "sort", X)(
    {
        "the order of rounded scores": lambda x: jnp.argsort(x.astype(BF16)),
        "the falling order of rounded scores": lambda x: jnp.argsort(-x.astype(BF16)),
        "rows by rounded keys": lambda x: lax.sort_key_val(x[:, 0].astype(BF16), jnp.arange(4))[1],
    }
)
faults(CHOICE, "approx_top_k", X)(
    {"about the best of rounded scores": lambda x: lax.approx_max_k(x.astype(BF16), 2)[1]}
)

clean(X, backward=False)(
    {
        "the largest of logits": lambda x: jnp.argmax(x, -1),
        "the largest before the cast": lambda x: (x.astype(BF16), jnp.argmax(x, -1)),
        "the largest rounded number": lambda x: x.astype(BF16).max(-1),
        "a category of logits": lambda x: jax.random.categorical(KEY, x),
    }
)
clean(shape(4, 8), backward=False)(
    {
        "the largest of half logits": lambda x: lax.top_k(x, 2),
        "the largest of half sums": lambda x: jnp.argmax(x.sum(0)),
        "half logits that were float32 between": lambda x: jnp.argmax(x.astype(F32) * 2, -1),
    }
)
clean(shape(4, 8), shape(8, 6, dtype=F32), shape(6, dtype=F32), backward=False)(
    {
        "the largest of half logits with a stored bias": lambda x, w, b: jnp.argmax(
            x @ w.astype(x.dtype) + b.astype(x.dtype), -1
        )
    }
)
clean(shape(8, dtype=I32), backward=False)({"the largest of integers": lambda x: jnp.argmax(x)})
clean(X, backward=False)({"rounded numbers in order": lambda x: jnp.sort(x.astype(BF16))})
