"""Comparisons with the float32 matmuls of a program as a TPU or GPU multiplies them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.accel.emulated import emulated
from mpmodules import linen, nnx
from policy import compare
from tests.policy.errors import relative

X = jax.random.normal(jax.random.key(0), (8, 16))
MIXED = "mixed_bfloat16"


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="router")(x), linen.Dense(8, name="other")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.router, self.other = (nnx.Linear(16, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.router(x), self.other(x)


def errors(rule: str, wing: str) -> Any:
    rules: Any = {"router": rule}
    if wing == "linen":
        variables = Net().init(jax.random.key(1), X)
        found = compare(Net().apply, variables, X, policy=MIXED, rules=rules, on="tpu")
    else:
        found = compare(nnx.apply_policy(NnxNet(nnx.Rngs(0)), MIXED, rules), X, on="tpu")
    return {row.path: row.error for row in found.rows if row.kind == "activation"}


@pytest.mark.parametrize("wing", ["linen", "nnx"])
def test_a_float32_rule_holds_on_a_tpu_and_the_default_precision_costs_bfloat16s_error(wing):
    assert errors("float32", wing)["router"] < 1e-6
    lost = errors("c=f32,o=f32,x=default", wing)
    assert 1e-3 < lost["router"] < 1e-2
    assert 1e-3 < errors("float32", wing)["other"] < 1e-2


def test_a_float32_program_differs_on_devices_by_their_passes():
    w = jax.random.normal(jax.random.key(1), (16, 16))
    truth = np.asarray(X, np.float64) @ np.asarray(w, np.float64)

    for device in ("tpu", "gpu"):
        found = compare(jnp.dot, X, w, on=device).error
        assert found == pytest.approx(relative(emulated(jnp.dot, device)(X, w), truth), rel=1e-2)
    assert compare(jnp.dot, X, w).error == 0


def test_passes_inside_of_a_scan_and_of_gradients_are_measured():
    w = jax.random.normal(jax.random.key(1), (16, 16)) / 4

    def loss(w, x):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)
        return jnp.sum(x)

    found = compare(loss, {"w": w}["w"], X, backward=True, params=0, on="tpu")
    gradients = [row.error for row in found.rows if row.kind == "gradient"]
    assert gradients and all(1e-4 < error < 1e-1 for error in gradients)
    exact = compare(loss, w, X, backward=True, params=0)
    assert all(row.error == 0 for row in exact.rows)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'v5e'"):
        compare(jnp.dot, X, X.T, on="v5e")  # type: ignore[arg-type]
