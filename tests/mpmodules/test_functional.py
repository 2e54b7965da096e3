"""The maths that both wings share, against float64 numpy and upstream."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import functional

RNG = np.random.default_rng(0)
HALVES = ("bfloat16", "float16")


def matmul(lhs, rhs, **kwargs):
    return jnp.einsum("ij,jk->ik", lhs, rhs, **kwargs)


def dots(fn, *args):
    """(operand dtypes, result dtype) of every matmul in `fn`'s jaxpr."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found.append((tuple(v.aval.dtype.name for v in eqn.invars), eqn.outvars[0].aval.dtype.name))
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def test_half_and_wider():
    assert functional.is_half(jnp.bfloat16) and functional.is_half("float16")
    assert not functional.is_half(jnp.float32) and not functional.is_half(jnp.int8)
    assert functional.is_wider(jnp.float32, jnp.bfloat16) and not functional.is_wider(jnp.float16, jnp.bfloat16)


def test_widen_never_narrows_and_leaves_other_things_alone():
    x = jnp.ones(2, jnp.bfloat16)
    assert functional.widen(x, jnp.float32).dtype == jnp.float32
    wide, whole = jnp.ones(2), jnp.arange(2)
    assert functional.widen(wide, jnp.bfloat16) is wide
    assert functional.widen(whole, jnp.float32) is whole
    assert functional.widen(None, jnp.float32) is None


# --- accumulating ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_an_accumulating_matmul_returns_float32_and_differentiates_on_half_operands(half):
    lhs, rhs = (jnp.asarray(RNG.normal(size=shape), half) for shape in ((3, 4), (4, 5)))
    run = functional.accumulating(matmul, jnp.float32)
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
    np.testing.assert_allclose(np.asarray(gradients[0], np.float64), 2 * a @ b @ b.T, atol=tolerance)


def test_an_accumulating_matmul_has_forward_mode_vmap_and_second_derivatives():
    lhs, rhs = (jnp.asarray(RNG.normal(size=(3, 3)), jnp.bfloat16) for _ in range(2))
    run = functional.accumulating(matmul, jnp.float32)
    out, tangent = jax.jvp(run, (lhs, rhs), (lhs, rhs))
    np.testing.assert_allclose(tangent, 2 * out, rtol=2**-6, atol=2**-6)
    assert jax.vmap(run)(lhs[None], rhs[None]).dtype == jnp.float32
    hessian = jax.hessian(lambda x: run(x, x).sum())(lhs)
    assert hessian.shape == (3, 3, 3, 3) and bool(jnp.isfinite(hessian.astype(jnp.float32)).all())


def test_accumulating_stand_ins_are_values():
    for make in (
        functional.accumulating_dot_general,
        functional.accumulating_conv,
        functional.accumulating_einsum,
    ):
        assert make("float32") == make(jnp.float32) and hash(make("float32")) == hash(make(jnp.float32))
        assert make("float32") != make("float64")
    assert functional.accumulating_conv("float32") != functional.accumulating_dot_general("float32")


def test_accumulating_stand_ins_take_what_the_originals_take():
    x = jnp.ones((1, 5, 2), jnp.float16)
    kernel = jnp.ones((3, 2, 4), jnp.float16)
    conv = functools.partial(
        functional.accumulating_conv("float32"),
        window_strides=(1,),
        padding="SAME",
        dimension_numbers=("NHC", "HIO", "NHC"),
    )
    assert dots(jax.grad(lambda x, k: conv(x, k).sum(), argnums=(0, 1)), x, kernel)[0][1] == "float32"
    dot = functional.accumulating_dot_general("float32")
    assert dot(x, x, (((2,), (2,)), ((0,), (0,)))).dtype == jnp.float32
    einsum = functional.accumulating_einsum("float32")
    assert einsum("bij,bkj->bik", x, x, preferred_element_type=None).dtype == jnp.float32


# --- shifted --------------------------------------------------------------------------------------------------------


def test_a_shift_takes_away_one_element_and_lets_no_gradient_through_it():
    x = jnp.asarray(1000 + RNG.normal(size=(4, 8)), jnp.float32)
    np.testing.assert_array_equal(functional.shifted(x, -1), x - x[:, :1])
    np.testing.assert_array_equal(functional.shifted(x, (0, 1)), x - x[0, 0])
    np.testing.assert_array_equal(jax.grad(lambda x: functional.shifted(x, -1).sum())(x), np.ones((4, 8)))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_shift_of_nothing_is_nothing(shape):
    assert functional.shifted(jnp.ones(shape), -1).shape == shape


# --- attention ------------------------------------------------------------------------------------------------------


def qkv(half, heads=4, key_heads=4):
    shapes = ((2, 3, heads, 8), (2, 5, key_heads, 8), (2, 5, key_heads, 8))
    return tuple(jnp.asarray(RNG.normal(size=shape), half) for shape in shapes)


def exact_weights(query, key, bias=None, allowed=None):
    q, k = (np.asarray(x, np.float64) for x in (query, key))
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    logits = logits if bias is None else logits + bias
    logits = logits if allowed is None else np.where(allowed, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_weights_are_exact_to_float32_with_grouped_heads(dtype, key_heads):
    query, key, _ = qkv(dtype, key_heads=key_heads)
    weights = functional.dot_product_attention_weights(query, key)
    assert (weights.shape, weights.dtype) == ((2, 4, 3, 5), jnp.float32)
    np.testing.assert_allclose(weights, exact_weights(query, key), rtol=2e-5, atol=1e-6)


def test_bias_mask_and_causality():
    query, key, _ = qkv("bfloat16")
    bias = RNG.normal(size=(1, 4, 3, 5)).astype(np.float32)
    mask = RNG.random(size=(2, 1, 3, 5)) > 0.3
    mask[..., 0] = True
    allowed = mask & np.tril(np.ones((3, 5), bool))
    weights = functional.dot_product_attention_weights(
        query, key, bias=jnp.asarray(bias), mask=jnp.asarray(mask), is_causal=True
    )
    np.testing.assert_allclose(weights, exact_weights(query, key, bias, allowed), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("half", HALVES)
def test_a_row_without_keys_is_uniform_forward_and_finite_backward(half):
    query, key, _ = qkv(half)
    mask = jnp.ones((1, 1, 3, 5), bool).at[..., 1, :].set(False)

    def weights(query):
        return functional.dot_product_attention_weights(query, key, mask=mask, bias=jnp.full((1, 1, 1, 1), -1e30))

    np.testing.assert_allclose(weights(query)[:, :, 1], 0.2, rtol=1e-6)
    assert bool(jnp.isfinite(jax.grad(lambda q: weights(q).sum())(query).astype(jnp.float32)).all())


def test_values_are_summed_by_weight_with_grouped_heads():
    weights = jnp.asarray(RNG.random(size=(2, 4, 3, 5)), jnp.float32)
    value = qkv("float32", key_heads=2)[2]
    expected = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(value, 2, axis=-2))
    np.testing.assert_allclose(functional.weighted_values(weights, value), expected, rtol=1e-5, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused():
    query, key, value = qkv("float32")
    check = functional.check_attention_shapes
    with pytest.raises(ValueError, match=r"q, k, v must have same rank, but got 4, 3, 4\."):
        check(query, key[0], value)
    with pytest.raises(
        ValueError, match=r"q, k, v batch dims must match, but got shapes \(2, 3, 4, 8\), \(1, 5, 4, 8\)"
    ):
        check(query, key[:1], value)
    with pytest.raises(ValueError, match=r"k, v lengths must match, but got 5 and 4\."):
        check(query, key, value[:, :4])
    with pytest.raises(ValueError, match=r"q, k depths must match, but got 8 and 7\."):
        functional.dot_product_attention_weights(query, key[..., :7])
    with pytest.raises(
        ValueError, match=r"Query heads \(4\) must be a multiple of key heads \(3\) for grouped queries\."
    ):
        functional.dot_product_attention_weights(query, key[..., :3, :])
    with pytest.raises(ValueError, match=r"Query heads \(4\) must be a multiple of value heads \(3\)\."):
        functional.weighted_values(jnp.ones((2, 4, 3, 5)), value[..., :3, :])


def test_dropout_keeps_the_mean_and_checks_its_arguments():
    weights = jnp.ones((2, 4, 64, 64), jnp.bfloat16)
    dropped = functional.attention_dropout(weights, 0.25, broadcast=False, batch_axes=1, rng=jax.random.key(0))
    assert dropped.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(dropped.astype(jnp.float32).mean()), 1, atol=0.02)
    shared = functional.attention_dropout(weights, 0.25, broadcast=True, batch_axes=1, rng=jax.random.key(0))
    assert bool((shared == shared[:1, :1]).all())
    with pytest.raises(ValueError, match=r"dropout_rate must be in the range \[0, 1\), got 1\.0\."):
        functional.attention_dropout(weights, 1.0, broadcast=True, batch_axes=1, rng=jax.random.key(0))
    with pytest.raises(ValueError, match="dropout_rng is required when dropout_rate > 0 and deterministic=False"):
        functional.attention_dropout(weights, 0.5, broadcast=True, batch_axes=1, rng=None)
