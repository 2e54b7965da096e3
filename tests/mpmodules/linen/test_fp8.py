"""Flax's fp8 matmuls through gradients and optimizer: what overwrites is not scaled, cast, clipped
or stepped.
"""

import warnings
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpmodules import linen as nn
from policy import apply_gradients, loss_scale_of, mixed_precision, use_policy, value_and_grad

OWG = "_overwrite_with_gradient"
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.bfloat16)


@pytest.fixture(scope="module")
def case() -> Any:
    model = nn.Dense(16, dot_general_cls=flax.linen.Fp8DirectDotGeneralOp)
    apply: Any = model.apply
    with use_policy("mixed_bfloat16"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = model.init(jax.random.key(0), X)

    def loss_fn(variables, x, factor=1.0):
        with use_policy("mixed_bfloat16"):
            return jnp.square(apply(variables, x).astype(jnp.float32)).mean() * factor

    return variables, loss_fn


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_the_collection_takes_the_value_that_plain_jax_gives_it(case, grads):
    variables, loss_fn = case
    tx = mixed_precision(
        optax.adamw(1e-2, weight_decay=0.1),
        "mixed_bfloat16",
        loss_scale="dynamic",
        clip_global_norm=1e-3,
    )
    opt_state = tx.init(variables)
    assert len(jax.tree.leaves(opt_state.inner)) == 5  # a count, two moments of kernel and bias

    @jax.jit
    def step(variables, opt_state, factor):
        differentiated = value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state), grads=grads)
        return apply_gradients(tx, variables, opt_state, differentiated(variables, X, factor)[1])

    new, after, finite = step(variables, opt_state, 1.0)
    assert finite
    expected = jax.grad(loss_fn)(variables, X)[OWG]
    # the scales of the operands are plain JAX's; that of the output's gradient follows the loss
    # scale
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(new[OWG]), jax.tree.leaves(expected), strict=True
    ):
        assert ours.dtype == theirs.dtype
        if "output_grad" not in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert not equal(new[OWG], variables[OWG])
    assert not equal(new["params"], variables["params"])

    skipped, after, finite = step(new, after, np.nan)
    assert not finite
    assert equal(skipped, new)  # the collection keeps its old value too
    assert after.skipped == 1
