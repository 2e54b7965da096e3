"""Casts to float32 of both operands of a matmul: wherever they are written, they are obeyed."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import Policy, autocast, cast_floating
from tests.programs import precisions

X, W = jnp.ones((4, 8)), jnp.ones((8, 3))
F32, FULL = jnp.float32, Policy("float32", "float32", "float32")


def helper(a: Any) -> Any:
    return a.astype(jnp.float32)


def matmul(cast: Any, x: Any, w: Any) -> Any:
    return cast(x) @ cast(w)


def with_casts(function: Any) -> Any:
    @functools.wraps(function)
    def casting(*arrays: Any) -> Any:
        return function(*(array.astype(jnp.float32) for array in arrays))

    return casting


@with_casts
def decorated(x: Any, w: Any) -> Any:
    return x @ w


class Config:
    router_dtype = jnp.float32


class Caster:
    def __call__(self, a: Any) -> Any:
        return a.astype(jnp.float32)


class Proxy:
    """An object that can't be looked into, as those of web frameworks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


request = Proxy()
short = lambda a: a.astype(jnp.float32)  # noqa: E731
HELPERS = {"upcast": lambda a: a.astype(jnp.float32)}
part, caster = functools.partial(jnp.asarray, dtype=jnp.float32), Caster()

WRITTEN: dict[str, Any] = {
    "a function": lambda x, w: helper(x) @ helper(w),
    "a lambda": lambda x, w: short(x) @ short(w),
    "a dict": lambda x, w: HELPERS["upcast"](x) @ HELPERS["upcast"](w),
    "an argument": lambda x, w: matmul(HELPERS["upcast"], x, w),
    "a partial": lambda x, w: part(x) @ part(w),
    "an object": lambda x, w: caster(x) @ caster(w),
    "a decorator": decorated,
    "a map": lambda x, w: jnp.matmul(*map(short, (x, w))),
    "cast_floating": lambda x, w: jnp.matmul(*cast_floating((x, w), "float32")),
    "cast_to_compute": lambda x, w: jnp.matmul(*FULL.cast_to_compute((x, w))),
    "a name of the dtype": lambda x, w: jnp.array(x, dtype=F32) @ jnp.array(w, dtype=F32),
    "a constant of a class": lambda x, w: (
        x.astype(Config.router_dtype) @ w.astype(Config.router_dtype)
    ),
    "float": lambda x, w: x.astype(float) @ w.astype(float),
    "f4": lambda x, w: x.astype("f4") @ w.astype("f4"),
    "the dtype of a constant": lambda x, w: (
        x.astype(jnp.zeros(()).dtype) @ w.astype(jnp.zeros(()).dtype)
    ),
    "pad": lambda x, w: jnp.pad(helper(x), ((0, 0), (0, 1))) @ jnp.pad(helper(w), ((0, 1), (0, 0))),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_cast_of_both_operands_is_obeyed_wherever_it_is_written(name):
    found = precisions(autocast(WRITTEN[name], "mixed_bfloat16"), X, W)
    assert found == {("float32", "highest")}


INSIDE: dict[str, Any] = {
    "jit": lambda x, w: jax.jit(jnp.matmul)(helper(x), helper(w)),
    "checkpoint": lambda x, w: jax.checkpoint(lambda a, b: a @ b)(helper(x), helper(w)),
    "cond": lambda x, w: lax.cond(
        x[0, 0] > 0, jnp.matmul, lambda a, b: jnp.zeros((4, 3)), helper(x), helper(w)
    ),
    "scan": lambda x, w: lax.scan(lambda w, row: (w, row @ w), helper(w), helper(x))[1],
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_cast_is_obeyed_by_a_matmul_in_a_program_inside(name):
    found = precisions(autocast(INSIDE[name], "mixed_bfloat16"), X, W)
    assert found == {("float32", "highest")}


def product(x: Any, w: Any) -> Any:
    return x.astype(jnp.float32) @ w.astype(jnp.float32)


def squares(x: Any, w: Any) -> Any:
    return jnp.sum(product(x, w) ** 2)


DIFFERENTIATED: dict[str, Any] = {
    "vjp": lambda x, w: jax.vjp(product, x, w)[0],
    "jvp": lambda x, w: jax.jvp(product, (x, w), (x, w))[1],
    "linearize": lambda x, w: jax.linearize(product, x, w)[0],
    "grad": lambda x, w: jax.grad(squares)(x, w),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_cast_is_obeyed_in_code_that_differentiates(name):
    found = precisions(autocast(DIFFERENTIATED[name], "mixed_bfloat16"), X, W)
    assert found == {("float32", "highest")}


def test_a_rule_that_differentiates_its_function_obeys_its_casts():
    function = jax.custom_vjp(product)
    function.defvjp(lambda x, w: jax.vjp(product, x, w), lambda pull, cotangent: pull(cotangent))
    x, w = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    y, pull = jax.vjp(autocast(function, "mixed_bfloat16"), x, w)
    truth, pull_of_truth = jax.vjp(product, x, w)
    np.testing.assert_array_equal(y, truth)
    for found, right in zip(pull(truth), pull_of_truth(truth), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["an argument", "a field", "of another array"])
def test_a_cast_to_the_dtype_that_the_code_is_given_is_left_to_the_policy(name):
    field = type("Fields", (), {"dtype": jnp.float32})()

    def code(x: Any, w: Any, dtype: Any = jnp.float32, self: Any = field) -> Any:
        asked = {"an argument": dtype, "a field": self.dtype, "of another array": x.dtype}[name]
        return x.astype(asked) @ w.astype(asked)

    found = precisions(autocast(lambda x, w: code(x, w), "mixed_bfloat16"), X, W)
    assert found == {("bfloat16", None)}


SCALE = jnp.ones((1, 3))
ELEMENTWISE: dict[str, Any] = {
    "a scale": lambda x, w: (x @ w * SCALE.astype(jnp.float32)) @ w.T,
    "a bias": lambda x, w: (x @ w + SCALE.astype(jnp.float32)) @ w.T,
    "a gate": lambda x, w: (jax.nn.sigmoid((x @ w).astype(jnp.float32)) * (x @ w)) @ w.T,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_cast_in_front_of_a_product_with_an_activation_is_no_request_for_a_matmul(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = precisions(autocast(ELEMENTWISE[name], "mixed_bfloat16"), X, W)
    assert found == {("bfloat16", None)}
