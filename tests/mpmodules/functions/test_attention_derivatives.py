"""`attention.dot_product_attention` beside float64: first derivatives in both modes, and second
ones.

Truth is the formula in numpy, differentiated by central differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.functions.attention import dot_product_attention

RNG = np.random.default_rng(0)
BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 3, 5, 4, 8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"key_heads": 2},
    "one key head": {"key_heads": 1},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "causal, grouped, with a bias": {"is_causal": True, "key_heads": 2, "bias": True},
    "precision": {"precision": "highest"},
    "a precision for each operand": {
        "precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
    },
}
Operands = tuple[Any, ...]  # queries, keys, values, and the bias where there is one


def case(
    half: str, key_heads: int = HEADS, bias: bool = False, mask: bool = False, **options: Any
) -> Any:
    """Operands, and the other arguments. The mask leaves the second query of every head no key."""
    shapes = [(BATCH, QUERIES, HEADS, WIDTH), *[(BATCH, KEYS, key_heads, WIDTH)] * 2]
    operands = [jnp.asarray(RNG.normal(size=shape), half) for shape in shapes]
    if bias:
        operands.append(jnp.asarray(RNG.normal(size=(1, HEADS, QUERIES, KEYS)), jnp.float32))
    if mask:
        allowed = RNG.random(size=(BATCH, 1, QUERIES, KEYS)) > 0.3
        allowed[..., 0] = True
        allowed[..., 1, :] = False
        options["mask"] = jnp.asarray(allowed)
    return tuple(operands), options


def ours(options: Any) -> Callable[..., jax.Array]:
    def run(query: Any, key: Any, value: Any, bias: Any = None) -> jax.Array:
        return dot_product_attention(query, key, value, bias=bias, **options)

    return run


def exact(options: Any) -> Callable[..., np.ndarray]:
    def run(query: Any, key: Any, value: Any, bias: Any = 0.0) -> np.ndarray:
        key, value = (np.repeat(x, HEADS // x.shape[-2], axis=-2) for x in (key, value))
        logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH) + bias
        allowed = np.asarray(options.get("mask", True)) & np.ones((QUERIES, KEYS), bool)
        if options.get("is_causal"):
            allowed = allowed & np.tri(QUERIES, KEYS, dtype=bool)
        logits = np.where(allowed, logits, -1e30)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)

    return run


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def directional(
    function: Callable[..., Any], at: Operands, towards: Operands, step: float = 1e-5
) -> Any:
    high, low = (
        function(*(x + by * t for x, t in zip(at, towards, strict=True))) for by in (step, -step)
    )
    return jax.tree.map(lambda high, low: (high - low) / (2 * step), high, low)


def gradients(
    function: Callable[..., np.ndarray], at: Operands, weights: np.ndarray, step: float = 1e-5
) -> list[Any]:
    found = [np.zeros(x.shape) for x in at]
    for i, slopes in enumerate(found):
        for index in np.ndindex(slopes.shape):
            towards = [np.zeros(x.shape) for x in at]
            towards[i][index] = 1
            slopes[index] = (weights * directional(function, at, tuple(towards), step)).sum()
    return found


def assert_near(found: Any, true: np.ndarray, roundings: float, half: str) -> None:
    """Within so many roundings to half of the largest number."""
    error = np.abs(wide(found) - true).max() / np.abs(true).max()
    assert error <= roundings * float(jnp.finfo(half).eps) / 2


@pytest.mark.parametrize(
    ("name", "half"), [*((name, "float16") for name in CASES), ("plain", "bfloat16")]
)
def test_values_and_both_modes_of_derivative_are_those_of_float64(name, half):
    at, options = case(half, **CASES[name])
    tangents, cotangent = jax.tree.map(
        lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype), (at, at[0])
    )

    @jax.jit
    def run(at: Any, tangents: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(ours(options), *at)
        return y, pull(cotangent), jax.jvp(ours(options), at, tangents)[1]

    y, cotangents, tangent = run(at, tangents, cotangent)
    truth = exact(options)
    assert y.dtype == tangent.dtype == half
    assert_near(y, truth(*wide(at)), 2, half)  # of the exponentials, and of the result
    assert_near(tangent, directional(truth, wide(at), wide(tangents)), 8, half)
    for operand, found, true in zip(
        at, cotangents, gradients(truth, wide(at), wide(cotangent)), strict=True
    ):
        assert found.dtype == operand.dtype
        assert_near(found, true, 8, half)  # of weights, cotangents and products, in sums


@pytest.mark.parametrize("name", ["grouped heads", "mask", "bias"])
def test_second_derivatives_are_those_of_float64(name):
    half = "float16"
    at, options = case(half, **CASES[name])
    tangents, cotangent = jax.tree.map(
        lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype), (at, at[0])
    )
    every = tuple(range(len(at)))

    def loss(*at: Any) -> jax.Array:
        return jnp.sum(ours(options)(*at).astype(jnp.float32) * cotangent.astype(jnp.float32))

    def along(*at: Any) -> jax.Array:
        return jax.jvp(loss, at, tangents)[1]

    def along_slope(*at: Any) -> jax.Array:
        slopes = jax.grad(loss, every)(*at)
        return sum(
            jnp.sum((s * t).astype(jnp.float32)) for s, t in zip(slopes, tangents, strict=True)
        )  # pyright: ignore

    @jax.jit
    def products(at: Any) -> Any:
        forward_over_reverse = jax.jvp(jax.grad(loss, every), at, tangents)[1]
        return forward_over_reverse, jax.grad(along, every)(*at), jax.grad(along_slope, every)(*at)

    def slopes(*at: Any) -> Any:
        return gradients(exact(options), at, wide(cotangent), 1e-4)

    true = directional(slopes, wide(at), wide(tangents), 1e-4)
    for found in products(at):
        for ours_, exact_ in zip(found, true, strict=True):
            assert_near(ours_, exact_, 12, half)


def test_frozen_operands_leave_the_gradients_of_others_as_they_are():
    at, options = case("bfloat16", bias=True)
    loss = lambda *at: jnp.sum(ours(options)(*at).astype(jnp.float32) ** 2)  # noqa: E731
    every = jax.grad(loss, (0, 1, 2, 3))(*at)
    for free in ((0,), (1,), (2,), (3,), (0, 2), (1, 3)):
        for found, i in zip(jax.grad(loss, free)(*at), free, strict=True):
            assert_near(found, wide(every[i]), 2, "bfloat16")


def test_batches_are_attended_one_at_a_time():
    at, options = case("bfloat16", key_heads=2)
    loss = lambda *at: jnp.sum(ours(options)(*at).astype(jnp.float32) ** 2)  # noqa: E731
    batched = jax.vmap(jax.grad(loss, (0, 1, 2)))(*at)
    for found, alone in zip(batched, jax.grad(loss, (0, 1, 2))(*at), strict=True):
        assert_near(found, wide(alone), 2, "bfloat16")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(
            ("bias", shape)
            for shape in ((BATCH, HEADS, 1, KEYS), (1, HEADS, QUERIES, KEYS), (1, 1, QUERIES, 1))
        ),
        *(
            ("mask", shape)
            for shape in (
                (BATCH, HEADS, 1, KEYS),
                (HEADS, QUERIES, KEYS),
                (QUERIES, KEYS),
                (1, 1, KEYS),
            )
        ),
    ],
)
def test_grouped_heads_take_a_bias_and_a_mask_of_every_shape(name, shape):
    at, _ = case("bfloat16", key_heads=2)
    given = RNG.normal(size=shape) if name == "bias" else RNG.random(size=shape) > 0.3
    options = {name: jnp.asarray(given, jnp.float32 if name == "bias" else bool)}
    repeated = (at[0], *(jnp.repeat(x, HEADS // 2, axis=-2) for x in at[1:]))
    assert_near(
        dot_product_attention(*at, **options),
        wide(dot_product_attention(*repeated, **options)),
        1,
        "bfloat16",
    )
