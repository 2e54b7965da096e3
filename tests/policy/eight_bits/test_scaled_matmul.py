"""Matmuls in 8 bits: their error beside float64, by row and by tensor, and what is not finite."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy.core.matmul_dtypes import ScaledMatmul, scaled_matmul_of
from policy.core.policy_warnings import DtypePolicyWarning
from policy.eight_bits.scaled_matmul import (
    quantise,
    quantise_for,
    scaled_dot_general,
    scaled_einsum,
    shared_operands,
    warn_if_emulated,
)
from tests.policy.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
MATMUL = (((1,), (0,)), ((), ()))
KINDS = ("f8", "i8")


def scaled(text: str) -> ScaledMatmul:
    by = scaled_matmul_of(text)
    assert by is not None
    return by


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def with_gradients(x: Any, w: Any, ct: Any, by: ScaledMatmul) -> tuple[Any, Any, Any]:
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, w)]
    y, pullback = jax.vjp(lambda x, w: scaled_dot_general(x, w, MATMUL, by).astype(x.dtype), *half)
    return y, *pullback(jnp.asarray(ct, y.dtype))


@pytest.mark.parametrize(("kind", "forward"), [("f8", 0.045), ("i8", 0.015)])
def test_gaussian_operands_are_within_the_published_errors(kind, forward):
    x, w, ct = (normal(512, 512) for _ in range(3))
    y, dx, dw = with_gradients(x, w, ct, scaled(kind))
    wide = [a.astype(np.float64) for a in (x, w, ct)]
    assert relative(y, wide[0] @ wide[1]) <= forward
    assert relative(dx, wide[2] @ wide[1].T) <= 0.065
    assert relative(dw, wide[0].T @ wide[2]) <= 0.065
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_of_rows_that_differ_in_size_a_scale_for_each_keeps_the_worst(kind):
    x = normal(512, 512) * np.exp(4 * RNG.standard_normal((512, 1))).astype(np.float32)
    w = normal(512, 512)
    truth = x.astype(np.float64) @ w

    def worst(by: ScaledMatmul) -> float:
        y = np.asarray(scaled_dot_general(jnp.asarray(x), jnp.asarray(w), MATMUL, by), np.float64)
        return float(np.max(np.linalg.norm(y - truth, axis=1) / np.linalg.norm(truth, axis=1)))

    assert worst(scaled(kind)) <= 0.065
    assert worst(scaled(f"{kind}:tensor")) > 0.9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_not_finite_stays_not_finite_in_its_row_alone(kind, bad):
    x = normal(4, 8)
    x[2, 3] = bad
    y = np.asarray(
        scaled_dot_general(jnp.asarray(x), jnp.asarray(normal(8, 3)), MATMUL, scaled(kind))
    )
    assert np.array_equal(np.isnan(y), np.arange(4)[:, None] == np.full((1, 3), 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 1e-30, 1.0, 3e38])
def test_any_size_of_number_has_a_finite_scale_and_codes(kind, size):
    by = scaled(kind)
    found = quantise(jnp.asarray([[size, -size / 2]], jnp.float32), (1,), by.operands)
    assert found.scale.shape == (1, 1) and 2.0**-126 <= float(found.scale[0, 0]) < np.inf
    assert bool(jnp.all(jnp.isfinite(found.codes.astype(jnp.float32))))
    back = np.asarray(found.codes, np.float64) * np.asarray(found.scale, np.float64)
    assert np.allclose(back, [[size, -size / 2]], rtol=0.07, atol=2.0**-126)


def test_float8_scales_are_powers_of_two_and_int8s_are_exact():
    x = jnp.asarray(normal(16, 8) * 100)
    powers = np.log2(np.asarray(quantise(x, (1,), scaled("f8").operands).scale))
    assert np.array_equal(powers, np.round(powers))
    found = quantise(x, (1,), scaled("i8").operands)
    assert np.asarray(jnp.max(jnp.abs(found.codes), axis=1)).tolist() == [127] * 16


@pytest.mark.parametrize(
    ("numbers", "shapes"),
    [
        ((((2,), (0,)), ((), ())), ((2, 4, 8), (8, 3, 5))),
        ((((0, 1), (1, 0)), ((), ())), ((4, 8, 2), (8, 4, 3))),
        ((((1, 3), (2, 0)), ((0,), (1,))), ((3, 8, 5, 6), (6, 3, 8, 7))),
    ],
)
@pytest.mark.parametrize("text", ["i8", "i8:tensor", "i8:compute"])
def test_any_dimension_numbers_have_their_gradients(numbers, shapes, text):
    lhs, rhs = (jnp.asarray(normal(*shape)) for shape in shapes)
    truth, pullback = jax.vjp(lambda a, b: lax.dot_general(a, b, numbers), lhs, rhs)
    y, ours = jax.vjp(lambda a, b: scaled_dot_general(a, b, numbers, scaled(text)), lhs, rhs)
    ct = jnp.asarray(normal(*truth.shape))
    for found, true in zip((y, *ours(ct)), (truth, *pullback(ct)), strict=True):
        assert found.shape == true.shape
        assert relative(found, np.asarray(true, np.float64)) < 0.03


@pytest.mark.parametrize("weight", ["lhs", "rhs"])
def test_a_weight_gradient_in_compute_dtype_is_not_rounded_to_8_bits(weight):
    lhs, rhs, ct = (jnp.asarray(normal(64, 64), jnp.bfloat16) for _ in range(3))

    def pulled(text: str) -> Any:
        def run(a: jax.Array, b: jax.Array) -> jax.Array:
            return scaled_dot_general(a, b, MATMUL, scaled(text), weight=weight).astype(a.dtype)

        return jax.vjp(run, lhs, rhs)[1](ct)

    exact = jax.vjp(jnp.matmul, lhs, rhs)[1](ct)
    side = ("lhs", "rhs").index(weight)
    for i, (found, true) in enumerate(zip(pulled("f8:compute"), exact, strict=True)):
        off = relative(found, np.asarray(true, np.float64))
        assert (off < 0.004) == (i == side) and off < 0.08


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ab,bc->ac", ((3, 4), (4, 5))),
        ("...a,abc->...bc", ((2, 3, 4), (4, 5, 6))),
        ("b q h d, h d o -> o b q", ((2, 3, 4, 5), (4, 5, 6))),
        ("abc,acd->bda", ((2, 3, 4), (2, 4, 5))),
    ],
)
def test_an_einsum_is_one_matmul(subscripts, shapes):
    lhs, rhs = (normal(*shape) for shape in shapes)
    found = scaled_einsum(subscripts, jnp.asarray(lhs), jnp.asarray(rhs), scaled("i8"))
    truth = np.einsum(subscripts.replace(" ", ""), lhs.astype(np.float64), rhs)
    assert found is not None and relative(found, truth) < 0.02


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("aab,bc->ac", ((3, 3, 4), (4, 5))),
        ("ab,bc->a", ((3, 4), (4, 5))),
        ("ab,bc", ((3, 4), (4, 5))),
    ],
)
def test_an_einsum_that_is_no_matmul_is_left_to_the_caller(subscripts, shapes):
    lhs, rhs = (jnp.zeros(shape) for shape in shapes)
    assert scaled_einsum(subscripts, lhs, rhs, scaled("i8")) is None


def test_a_shared_operand_is_quantised_once():
    x, w, by = jnp.ones((2, 3)), jnp.ones((3, 2)), scaled("f8")

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        with shared_operands():
            return scaled_dot_general(x, w, MATMUL, by) + scaled_dot_general(x, 2 * w, MATMUL, by)

    casts = str(jax.make_jaxpr(run)(x, w)).count("new_dtype=float8_e4m3fn")
    assert casts == 3  # x, and two weights
    first = quantise_for(x, (1,), by)
    assert quantise_for(x, (1,), by) is not first


def test_an_operand_that_a_checkpoint_quantised_is_quantised_again_outside_of_it():
    x, w, by = jnp.ones((2, 3)), jnp.ones((3, 2)), scaled("i8")

    def run(x: jax.Array) -> jax.Array:
        with shared_operands():
            inside = jax.checkpoint(lambda: scaled_dot_general(x, w, MATMUL, by))()
            return inside + scaled_dot_general(x, w, MATMUL, by)

    assert jnp.allclose(jax.jit(run)(x), 6, rtol=0.01)
    assert jnp.allclose(jax.grad(lambda x: run(x).sum())(x), 4, rtol=0.01)


def test_a_backend_without_8_bit_matmuls_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_emulated(scaled("f8"))
        warn_if_emulated(scaled("f8"))
    assert [w.category for w in caught] == [DtypePolicyWarning]
    assert "cpu has no float8_e4m3fn matmuls" in str(caught[0].message)


@pytest.mark.parametrize(("platform", "kind"), [("cuda", "f8"), ("tpu", "f8"), ("tpu", "i8")])
def test_exported_programs_multiply_in_8_bits_three_times(platform, kind):
    by = scaled(kind)
    w = jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (scaled_dot_general(x, w, MATMUL, by).astype(x.dtype) ** 2).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=[platform])(x, w)
    lines = exported.mlir_module().splitlines()
    dots = [line for line in lines if "stablehlo.dot_general" in line]
    assert len(dots) == 3
    for line in dots:
        operands = line.split(" : (")[1].split(") ->")[0].split(", ")
        assert all(one.endswith(("xf8E4M3FN>", "xf8E5M2>", "xi8>")) for one in operands)
