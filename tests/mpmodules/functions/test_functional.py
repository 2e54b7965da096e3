"""The maths that both wings share, against float64 numpy and upstream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.functions import functional
from policy.functions.reductions import accumulating

RNG = np.random.default_rng(0)
HALVES = ("bfloat16", "float16")


def matmul(lhs, rhs, **kwargs):
    return jnp.einsum("ij,jk->ik", lhs, rhs, **kwargs)


# --- accumulating ---------------------------------------------------------------------------------


def test_an_accumulating_matmul_has_forward_mode_vmap_and_second_derivatives():
    lhs, rhs = (jnp.asarray(RNG.normal(size=(3, 3)), jnp.bfloat16) for _ in range(2))
    run = accumulating(matmul, jnp.float32)
    out, tangent = jax.jvp(run, (lhs, rhs), (lhs, rhs))
    np.testing.assert_allclose(tangent, 2 * out, rtol=2**-6, atol=2**-6)
    assert jax.vmap(run)(lhs[None], rhs[None]).dtype == jnp.float32
    hessian = jax.hessian(lambda x: run(x, x).sum())(lhs)
    assert hessian.shape == (3, 3, 3, 3) and bool(jnp.isfinite(hessian.astype(jnp.float32)).all())


@pytest.mark.parametrize("scanned", (False, True))
@pytest.mark.parametrize("half", HALVES)
def test_second_derivatives_reach_a_bias_also_through_a_scan(half, scanned):
    x, bias = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((4, 3), (3,)))

    def added(x, bias):
        return functional.add_bias(x.astype(half), bias.astype(half), (1, 3), stored=bias)

    def twice(add, x, bias):
        step = lambda x, _: (jnp.tanh(add(x, bias).astype(jnp.float32)), None)  # noqa: E731
        if scanned:
            return jax.lax.scan(step, x, length=2)[0]
        return step(step(x, None)[0], None)[0]

    def penalty(add):
        slope = jax.grad(lambda x, bias: jnp.sum(twice(add, x, bias)))
        return jax.grad(lambda bias: jnp.sum(slope(x, bias) ** 2))(bias)

    found, truth = penalty(added), penalty(lambda x, bias: x + bias[None])
    np.testing.assert_allclose(found, truth, atol=2e-2 * float(jnp.max(jnp.abs(truth))))
