from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import (
    DtypePolicyWarning,
    DynamicLossScale,
    StaticLossScale,
    current_policy,
    grad,
    use_policy,
    value_and_grad,
)
from policy.grads import ScaledGradients

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(64, 5)), jnp.float32)
W = jnp.asarray(RNG.normal(size=5), jnp.float32)


def loss_of(w, x=X):
    return jnp.square(x @ w).mean()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "scale", [None, 8, 8.0, jnp.float32(8), StaticLossScale(8), DynamicLossScale(8.0)]
)
def test_a_plain_tree_under_every_kind_of_scale_is_unscaled_float32_and_equals_jax(scale):
    scaled = value_and_grad(loss_of, loss_scale=scale, grads="compute")(W)[1]
    factor = 1 if scale is None else 8
    assert scaled.scale == factor
    np.testing.assert_array_equal(scaled.tree, jax.grad(loss_of)(W) * factor)
    found, expected = value_and_grad(loss_of, loss_scale=scale)(W), jax.value_and_grad(loss_of)(W)
    for one, truth in zip(found, expected, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_array_equal(one, truth)  # a power of two costs no rounding


def test_compute_gradients_are_rounded_to_the_compute_dtype_and_still_scaled():
    options: Any = {"loss_scale": 4.0, "grads": "compute"}
    function = grad(loss_of, **options)
    with use_policy("mixed_float16"):  # the scope gives the dtype where no policy is passed
        cases = [
            (function(W), "float16"),
            (grad(loss_of, policy="mixed_bfloat16", **options)(W), "bfloat16"),
        ]
    for scaled, dtype in (*cases, (function(W), "float32")):
        assert isinstance(scaled, ScaledGradients)
        assert scaled.tree.dtype == dtype
        np.testing.assert_array_equal(scaled.tree, (jax.grad(loss_of)(W) * 4).astype(dtype))


def test_the_policy_is_in_force_inside_the_loss_only():
    seen = []

    def loss(w):
        seen.append(current_policy())
        return w.sum()

    grad(loss, policy="mixed_bfloat16")(W)
    assert str(seen[0].compute_dtype) == "bfloat16"
    assert current_policy() is None


def test_the_loss_is_cast_to_float32_before_it_is_scaled():
    half = lambda w: w.astype(jnp.float16).sum()  # noqa: E731
    told = r"float16 loss, of 4 digits: cast the logits to float32.*policy\.losses"
    with pytest.warns(DtypePolicyWarning, match=told):
        value, gradient = value_and_grad(half, loss_scale=2.0**15)(jnp.full(4, 10.0))
    assert value.dtype == jnp.float32
    assert value == 40.0  # 40 * 2^15 is beyond float16
    np.testing.assert_array_equal(gradient, np.ones(4))


def test_small_float16_gradients_survive_through_the_scale():
    def loss(w):
        return (w.astype(jnp.float16) * jnp.float16(2.0**-14)).astype(jnp.float32).sum() * 2.0**-14

    w = jnp.ones(3)
    assert not jax.grad(loss)(w).any()
    np.testing.assert_array_equal(grad(loss, loss_scale=2.0**14)(w), np.full(3, 2.0**-28))


def test_aux_is_left_alone_whatever_it_holds():
    def loss(w):
        half = w.astype(jnp.float16) * jnp.float16(2)
        return w.astype(jnp.float32).sum(), {"half": half, "name": "text", "n": 3}

    for w in (W, W.astype(jnp.bfloat16)):
        (_, aux), gradient = value_and_grad(loss, has_aux=True, loss_scale=2.0**15)(w)
        assert (aux["name"], aux["n"], aux["half"].dtype) == ("text", 3, jnp.float16)
        np.testing.assert_array_equal(aux["half"], loss(w)[1]["half"])
        np.testing.assert_array_equal(gradient, np.ones(5))
        assert grad(loss, has_aux=True)(w)[1]["name"] == "text"


def test_argnums_and_keywords_work_as_in_jax():
    def loss(a, b, *, c):
        return ((a * b["x"]).sum() * c).astype(jnp.float32)

    for dtype in (jnp.float32, jnp.bfloat16):
        a, b, c = jnp.array([1, 2], dtype), {"x": jnp.array([3, 4], dtype)}, dtype(2)
        value, (gb, ga) = value_and_grad(loss, argnums=(1, 0))(a, b, c=c)
        assert value == 22
        np.testing.assert_array_equal(gb["x"], [2, 4])
        np.testing.assert_array_equal(ga, [6, 8])
        np.testing.assert_array_equal(grad(loss, argnums=-2)(a, b, c=dtype(1)), [3, 4])


def test_the_overwritten_collection_is_not_scaled_cast_or_rounded():
    @jax.custom_vjp
    def with_state(w, s):
        return w.astype(jnp.float32).sum()

    # fp8's rule: the "gradient" of the state is its new value, whatever the cotangent
    with_state.defvjp(
        lambda w, s: (with_state(w, s), (w, s)),
        lambda r, ct: (jnp.broadcast_to(ct, r[0].shape).astype(r[0].dtype), r[1] + 0.3),
    )
    key = "_overwrite_with_gradient"
    loss = lambda p: with_state(p["params"]["w"], p[key]["s"])  # noqa: E731
    for dtype in (jnp.float32, jnp.bfloat16):
        params = {"params": {"w": W.astype(dtype)}, key: {"s": jnp.ones(2, jnp.float32)}}
        plain = grad(loss, loss_scale=2.0**8)(params)
        scaled = grad(loss, loss_scale=2.0**8, grads="compute", policy="mixed_bfloat16")(params)
        for tree, factor in ((plain, 1), (scaled.tree, 2**8)):
            np.testing.assert_array_equal(tree[key]["s"], np.full(2, 1.3, np.float32))
            np.testing.assert_array_equal(tree["params"]["w"].astype(jnp.float32), factor)


# Each is a way to use one weight many times; the contributions are unequal and need more than 8
# bits to add up.
USES = 256
XS = jnp.asarray(RNG.normal(size=(USES, 4)), jnp.bfloat16)


def unrolled(w):  # fewer uses: each is compiled by itself
    return sum(jnp.dot(XS[i], w).astype(jnp.float32) for i in range(32))


def scanned(w):
    return jax.lax.scan(
        lambda c, x: (c + jnp.dot(x, w).astype(jnp.float32), None), jnp.float32(0), XS
    )[0]


def bias(w):
    return (jnp.broadcast_to(w[None], (USES, 4)) * XS).astype(jnp.float32).sum()


TIED = {
    "unrolled": unrolled,
    "jit": jax.jit(unrolled),
    "scan": scanned,
    "checkpoint": jax.checkpoint(scanned),
    "cond": lambda w: jax.lax.cond(True, scanned, bias, w),
    "nested": jax.jit(jax.checkpoint(jax.jit(scanned))),
    "transposed": lambda w: scanned(w[None].T.reshape(4)),
    "broadcast": bias,
}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("name", TIED)
def test_a_half_precision_weight_used_many_times_accumulates_in_float32(name):
    w = jnp.asarray([0.5, -1.5, 2.0, 0.25], jnp.bfloat16)
    truth = np.asarray(XS[:32] if name in ("unrolled", "jit") else XS, np.float64).sum(0)
    value, gradient = value_and_grad(TIED[name])(w)
    np.testing.assert_array_equal(value, TIED[name](w))  # the same program forward
    np.testing.assert_allclose(gradient, truth, rtol=1e-5, atol=1e-5)
    theirs = np.asarray(jax.grad(TIED[name])(w), np.float64)
    assert np.abs(theirs - truth).max() > 1e-3  # what a sum in bfloat16 gives
    rounded = grad(TIED[name], grads="compute", policy="bfloat16")(w).tree
    np.testing.assert_array_equal(rounded, gradient.astype(jnp.bfloat16))  # rounded once


def test_what_cannot_be_entered_still_gives_jaxs_gradient():
    @jax.custom_jvp
    def double(x):
        return x * x.dtype.type(2)

    double.defjvp(lambda primals, tangents: (double(*primals), double(*tangents)))

    def loop(w):
        return jax.lax.fori_loop(0, 3, lambda _, c: c * w, w)

    w = jnp.asarray([1.5, 0.5], jnp.bfloat16)
    for function in (double, loop):
        loss = lambda w, f=function: f(w).astype(jnp.float32).sum()  # noqa: E731
        np.testing.assert_array_equal(grad(loss)(w), jax.grad(loss)(w).astype(jnp.float32))


@pytest.mark.slow
def test_it_works_inside_jit_vmap_and_scan():
    function = value_and_grad(loss_of, loss_scale=8.0, grads="compute", policy="mixed_bfloat16")
    _, direct = function(W)
    _, jitted = jax.jit(function)(W)
    np.testing.assert_array_equal(direct.tree, jitted.tree)
    _, mapped = jax.vmap(function)(jnp.stack([W, W]))
    assert mapped.scale.shape == (2,)
    np.testing.assert_allclose(
        mapped.tree[0].astype(jnp.float32), direct.tree.astype(jnp.float32), rtol=2**-7
    )
    _, carried = jax.lax.scan(lambda c, w: (c, function(w)[1]), 0, jnp.stack([W, W]))
    np.testing.assert_array_equal(carried.scale, [8.0, 8.0])
    half = jax.vmap(grad(lambda w: jnp.square(w.astype(jnp.float32)).sum()))(
        jnp.ones((2, 3), jnp.bfloat16)
    )
    np.testing.assert_array_equal(half, np.full((2, 3), 2.0))


def test_a_jitted_call_outside_of_jit_is_compiled_once():
    traced = []

    @jax.jit
    def inner(w):
        traced.append(None)
        return w.astype(jnp.float32).sum()

    for _ in range(3):
        grad(inner)(jnp.ones(3, jnp.bfloat16))
    assert len(traced) == 1


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "function",
    [
        lambda scaled: jax.tree.map(lambda x: x * 2, scaled),
        lambda scaled: jax.tree.map(lambda x: jnp.clip(x, -1, 1), scaled),
        lambda scaled: jax.tree.map(lambda x: x.astype(jnp.float32), scaled),
        lambda scaled: jax.tree.map(jnp.add, scaled, scaled),
        lambda scaled: jax.vmap(lambda _: jax.lax.psum(scaled, "i"), axis_name="i")(jnp.ones(2)),
    ],
)
def test_arithmetic_mapped_over_scaled_gradients_raises(function):
    with pytest.raises((TypeError, NotImplementedError)):
        function(ScaledGradients({"w": W}, 8.0))


def test_scaled_gradients_index_like_their_tree_and_stay_scaled():
    scaled = ScaledGradients({"params": {"w": W}, "_overwrite_with_gradient": {"s": W}}, 8.0)
    assert "params" in scaled
    assert "other" not in scaled
    assert isinstance(scaled["params"], ScaledGradients)
    assert scaled["params"].scale == 8.0
    assert scaled["_overwrite_with_gradient"]["s"] is W
    assert "ScaledGradients({" in repr(scaled)
