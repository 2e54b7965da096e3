"""What the tables of mistakes share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

X = jnp.ones((2, 4))
KEY = jax.random.key(0)
