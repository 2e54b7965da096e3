"""The maths that both wings share, against float64 numpy and upstream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.functions import functional
from policy.functions.accumulators import accumulating
from policy.programs.walk import walk

RNG = np.random.default_rng(0)
HALVES = ("bfloat16", "float16")


def matmul(lhs, rhs, **kwargs):
    return jnp.einsum("ij,jk->ik", lhs, rhs, **kwargs)


def dots(fn, *args):
    """(operand dtypes, result dtype) of every matmul in `fn`'s jaxpr."""
    sites = walk(jax.make_jaxpr(fn)(*args))
    equations = [
        site.equation for site in sites if site.name in ("dot_general", "conv_general_dilated")
    ]
    return [
        (tuple(v.aval.dtype.name for v in e.invars), e.outvars[0].aval.dtype.name)
        for e in equations
    ]


def test_half_and_wider():
    assert functional.is_half(jnp.bfloat16) and functional.is_half("float16")
    assert not functional.is_half(jnp.float32) and not functional.is_half(jnp.int8)
    assert functional.is_wider(jnp.float32, jnp.bfloat16) and not functional.is_wider(
        jnp.float16, jnp.bfloat16
    )


def test_widen_never_narrows_and_leaves_other_things_alone():
    x = jnp.ones(2, jnp.bfloat16)
    assert functional.widen(x, jnp.float32).dtype == jnp.float32
    wide, whole = jnp.ones(2), jnp.arange(2)
    assert functional.widen(wide, jnp.bfloat16) is wide
    assert functional.widen(whole, jnp.float32) is whole
    assert functional.widen(None, jnp.float32) is None


# --- accumulating ---------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_an_accumulating_matmul_returns_float32_and_differentiates_on_half_operands(half):
    lhs, rhs = (jnp.asarray(RNG.normal(size=shape), half) for shape in ((3, 4), (4, 5)))
    run = accumulating(matmul, jnp.float32)
    both = ((half, half), "float32")
    assert dots(run, lhs, rhs) == [both]

    def loss(lhs, rhs):
        return jnp.square(run(lhs, rhs)).sum()

    forward, *backward = dots(jax.grad(loss, argnums=(0, 1)), lhs, rhs)
    assert forward == both and backward == [((half, half), half)] * 2
    gradients = jax.grad(loss, argnums=(0, 1))(lhs, rhs)
    assert [g.dtype.name for g in gradients] == [half, half]
    a, b = (np.asarray(x, np.float64) for x in (lhs, rhs))
    np.testing.assert_allclose(run(lhs, rhs), a @ b, rtol=1e-5, atol=1e-5)
    tolerance = 4 * float(jnp.finfo(half).eps) * np.abs(2 * a @ b).max() * np.abs(b).max()
    np.testing.assert_allclose(
        np.asarray(gradients[0], np.float64), 2 * a @ b @ b.T, atol=tolerance
    )


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
