"""The identity that keeps a half-precision array in memory on GPUs, and is nothing elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np

from policy.functions.checkpointing import materialized

X = jnp.asarray(np.linspace(-2, 2, 12).reshape(3, 4), jnp.bfloat16)


def test_values_tangents_and_cotangents_pass_unchanged():
    for run in (
        materialized,
        jax.jit(materialized),
        jax.vmap(materialized),
        jax.checkpoint(materialized),
    ):
        np.testing.assert_array_equal(run(X), X)
    y, tangent = jax.jvp(materialized, (X,), (2 * X,))
    np.testing.assert_array_equal((y, tangent), (X, 2 * X))
    np.testing.assert_array_equal(
        jax.grad(lambda x: jnp.sum(materialized(x) * X).astype(jnp.float32))(X), X
    )
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(materialized(x) ** 3))(x)))(X)
    np.testing.assert_array_equal(second, 6 * X)


def test_a_barrier_is_in_programs_for_gpus_alone():
    texts = {
        platform: jax.jit(jax.grad(lambda x: jnp.sum(materialized(x) * x)))
        .trace(X)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "tpu", "cuda", "rocm")
    }
    assert [name for name, text in texts.items() if "optimization_barrier" in text] == [
        "cuda",
        "rocm",
    ]
