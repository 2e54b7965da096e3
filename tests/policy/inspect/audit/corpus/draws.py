"""Draws in half precision that are compared with small probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.finding_kinds import DRAW, FUNCTION
from tests.policy.inspect.audit.corpus.planting import BF16, F16, F32, clean, faults

KEY = jax.random.key(0)


def uniform(x, *args):
    return jax.random.uniform(KEY, x.shape, x.dtype, *args)


faults(DRAW, "lt")(
    {
        "a rare event drawn in bfloat16": lambda x: jnp.where(uniform(x) < 0.001, 0, x),
        "bernoulli of a half probability": lambda x: jnp.where(
            jax.random.bernoulli(KEY, jnp.asarray(0.002, x.dtype), x.shape), x, 0
        ),
        "bernoulli of an array of half probabilities": lambda x: (
            x * jax.random.bernoulli(KEY, jnp.full(x.shape, 0.001, x.dtype))
        ),
        "bernoulli of stored half probabilities": lambda x: (
            x * jax.random.bernoulli(KEY, jnp.asarray(np.linspace(0.001, 0.002, 4), BF16), x.shape)
        ),
        "a path that is dropped": lambda x: x * (uniform(x[:, :1]) < 0.01),
        "a random action": lambda x: jnp.where(uniform(x[0, 0]) < 0.002, x, -x),
        "a small probability that is computed": lambda x: jnp.where(
            uniform(x) < jnp.asarray(0.1) * 0.01, 0, x
        ),
        "a rare event among a hundred": lambda x: jnp.where(uniform(x, 0, 100) < 0.1, 0, x),
    }
)
faults(DRAW, "lt", F16)(
    {"an almost sure event drawn in float16": lambda x: jnp.where(uniform(x) < 0.9995, x, 0)}
)
faults(DRAW, "ge", F16)(
    {"an almost sure event from below": lambda x: jnp.where(uniform(x) >= 0.0001, x, 0)}
)
faults(DRAW, "gt")(
    {"a rare event on the right": lambda x: x * (jnp.full_like(x, 0.003) > uniform(x))}
)
faults(DRAW, "floor")(
    {
        "a rare event by a floor": lambda x: x * jnp.floor(uniform(x) + 0.002),
        "an almost sure event by a floor": lambda x: x * jnp.floor(0.997 + uniform(x[:, :1])),
    }
)
faults(FUNCTION, "log")(
    {
        "gumbel noise by hand": lambda x: jnp.argmax(x - jnp.log(-jnp.log(uniform(x))), -1),
        "a category of half logits": lambda x: jax.random.categorical(KEY, x),
    }
)

clean()(
    {
        "a rare event drawn in float32": lambda x: jnp.where(
            jax.random.uniform(KEY, x.shape) < 0.001, 0, x
        ),
        "dropout by hand in half": lambda x: jnp.where(uniform(x) < 0.9, x, 0),
        "a coin": lambda x: jnp.where(jax.random.bernoulli(KEY, shape=x.shape), x, 0),
        "bernoulli of a float32 probability": lambda x: (
            x * jax.random.bernoulli(KEY, 0.001, x.shape)
        ),
        "a comparison of activations": lambda x: jnp.where(x < 0.001, 0, x),
        "noise in half": lambda x: x + 0.1 * jax.random.normal(KEY, x.shape, x.dtype),
        "a path that is dropped by a floor": lambda x: x * jnp.floor(0.875 + uniform(x[:, :1])),
    }
)
clean(F32)({"a floor of a float32 draw": lambda x: x * jnp.floor(0.999 + uniform(x))})
