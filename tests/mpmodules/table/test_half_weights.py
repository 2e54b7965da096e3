"""Half-precision parameters: initialisers that run; and nnx layers in the scope of their policy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, use_policy

ORTHOGONAL = jax.nn.initializers.orthogonal()
KEY, X = jax.random.key(0), jnp.ones((2, 3, 4))
BOXED = linen.with_partitioning(ORTHOGONAL, ("a", "b"))
MADE: dict[str, Any] = {
    "Dense": lambda: linen.Dense(4, kernel_init=ORTHOGONAL).init(KEY, X),
    "partitioned": lambda: linen.Dense(4, kernel_init=BOXED).init(KEY, X),
    "Embed": lambda: linen.Embed(4, 4, embedding_init=ORTHOGONAL).init(KEY, jnp.zeros(2, int)),
    "attention": lambda: linen.MultiHeadDotProductAttention(2, kernel_init=ORTHOGONAL).init(KEY, X),
    "Linear": lambda: flax_nnx.state(
        nnx.Linear(4, 4, kernel_init=ORTHOGONAL, rngs=flax_nnx.Rngs(0))
    ),
    "LoRA": lambda: flax_nnx.state(
        nnx.LoRA(4, 2, 4, a_initializer=ORTHOGONAL, rngs=flax_nnx.Rngs(0))
    ),
}


@pytest.mark.parametrize("policy", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", MADE)
def test_an_initialiser_that_fails_in_half_runs_in_float32(name, policy):
    wide = MADE[name]()
    with use_policy(policy):
        found = MADE[name]()
    for a, b in zip(*map(jax.tree.leaves, (found, wide)), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            assert a.dtype == policy
            if name in ("Dense", "Linear"):
                np.testing.assert_array_equal(a, b.astype(policy))


def test_an_nnx_layer_with_a_dtype_of_its_own_is_quiet_in_the_scope_that_it_was_built_in():
    with use_policy("mixed_bfloat16"):
        with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
            layer = nnx.Linear(4, 3, dtype=jnp.float32, rngs=flax_nnx.Rngs(0))
        layer(X[0])  # warnings are errors
    with use_policy("float16"), pytest.warns(DtypePolicyWarning, match="changes no nnx layer"):
        layer(X[0])
