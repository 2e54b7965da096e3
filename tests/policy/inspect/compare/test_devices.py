"""Comparisons with float32 matmuls as a TPU or GPU multiplies them, and of outputs that are no
floats: integers, booleans, complex numbers, and those that can't be measured.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.accel.emulated import emulated
from mpmodules import linen, nnx
from policy.inspect.compare.compare import compare
from policy.inspect.suggest.suggest import suggest
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


def errors(rule: str, api: str) -> Any:
    rules: Any = {"router": rule}
    if api == "linen":
        variables = Net().init(jax.random.key(1), X)
        found = compare(Net().apply, variables, X, policy=MIXED, rules=rules, on="tpu")
    else:
        found = compare(nnx.apply_policy(NnxNet(nnx.Rngs(0)), MIXED, rules), X, on="tpu")
    return {row.path: row.error for row in found.rows if row.kind == "activation"}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_float32_rule_holds_on_a_tpu_and_the_default_precision_costs_bfloat16s_error(api):
    assert errors("float32", api)["router"] < 1e-6
    lost = errors("c=f32,o=f32,x=default", api)
    assert 1e-3 < lost["router"] < 1e-2
    assert 1e-3 < errors("float32", api)["other"] < 1e-2


def test_a_float32_program_differs_on_devices_by_their_passes():
    w = jax.random.normal(jax.random.key(1), (16, 16))
    truth = np.asarray(X, np.float64) @ np.asarray(w, np.float64)

    for device in ("tpu", "gpu"):
        found = compare(jnp.dot, X, w, on=device).error
        assert found == pytest.approx(relative(emulated(jnp.dot, device)(X, w), truth), rel=1e-2)
    assert compare(jnp.dot, X, w).error == 0


@pytest.mark.slow
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


def test_an_unknown_device_is_rejected():
    with pytest.raises(ValueError, match="'v5e'"):
        compare(jnp.dot, X, X.T, on="v5e")  # type: ignore[arg-type]


# --- Outputs that are no floats ------------------------------------------------------------------

BF16, F32 = jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)
NUMBERS = jnp.asarray(RNG.normal(size=(64, 512)), F32)
NOTHING = "Nothing differs from float32"


def test_an_argmax_of_half_precision_is_reported_with_the_share_that_differs() -> None:
    comparison = compare(lambda x: jnp.argmax(x.astype(BF16), -1), NUMBERS)
    (row,) = comparison.outputs
    half, truth = (np.argmax(np.asarray(x, F32), -1) for x in (NUMBERS.astype(BF16), NUMBERS))
    share = float(np.mean(half != truth))
    assert row.error == comparison.error == pytest.approx(share) and share > 0
    assert row.dtype == "int32"
    assert NOTHING not in str(comparison) and f"{share:.2%} of the int32 differ" in str(comparison)


DIFFERING = np.asarray(NUMBERS.astype(BF16) > 1) != np.asarray(NUMBERS > 1)


@pytest.mark.slow
def test_integers_and_booleans_that_leave_a_module_have_rows_too() -> None:
    def routed(x: Any) -> Any:
        with jax.named_scope("router"):
            _, experts = jax.lax.top_k(x.astype(BF16), 4)
        with jax.named_scope("mask"):
            positive = x.astype(BF16) > 1.0
        return jnp.sum(experts, -1), positive, x[:, 0] > 0

    comparison = compare(routed, NUMBERS)
    assert [row.dtype for row in comparison.outputs] == ["int32", "bool", "bool"]
    assert comparison["router"].error > 0 and comparison.outputs[0].error > 0
    assert comparison["mask"].error == np.mean(DIFFERING) and comparison.outputs[2].error == 0


def test_the_share_that_differs_in_each_step_of_a_scan_is_in_its_steps() -> None:
    def scanned(x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            with jax.named_scope("choice"):
                return carry, row.astype(BF16) > 1.0

        return jax.lax.scan(step, 0, x)[1]

    steps = compare(scanned, NUMBERS)["choice"].steps
    np.testing.assert_allclose(steps, np.mean(DIFFERING, -1), rtol=1e-6)


@pytest.mark.slow
def test_complex_outputs_have_the_error_of_complex_vectors() -> None:
    def spectrum(x: Any) -> Any:
        with jax.named_scope("spectrum"):
            return jnp.fft.fft(x.astype(BF16).astype(F32))

    comparison = compare(spectrum, NUMBERS)
    half, truth = (np.fft.fft(np.asarray(x, np.float64)) for x in (NUMBERS.astype(BF16), NUMBERS))
    error = np.linalg.norm(half - truth) / np.linalg.norm(truth)
    np.testing.assert_allclose([comparison.error, comparison["spectrum"].error], error, rtol=1e-3)
    assert comparison.outputs[0].dtype == "complex64" and comparison.outputs[0].cosine < 1
    found = suggest(spectrum, NUMBERS, error=1e-4)
    assert found.paths == ("spectrum",) and found.without == pytest.approx(error, rel=1e-3)


def test_eight_bit_floats_are_measured() -> None:
    comparison = compare(lambda x: x.astype(jnp.float8_e4m3fn), NUMBERS)
    assert comparison.outputs[0].dtype == "float8_e4m3fn" and 0.01 < comparison.error < 0.1


@pytest.mark.slow
def test_nothing_differs_is_said_only_of_what_was_measured() -> None:
    key = compare(lambda x: jax.random.key(0), NUMBERS)
    assert key.rows == () and key.notes == (
        "Nothing was measured: neither a module nor the function returns numbers.",
    )
    both = compare(lambda x: (x, jax.random.key(0)), NUMBERS)
    assert both.notes == ("No measured value differs from float32; 1 outputs were not measured.",)
    undefined = compare(lambda x: jnp.log(-jnp.abs(x)), NUMBERS)
    assert NOTHING not in str(undefined) and "float32 itself is infinite or NaN" in str(undefined)
    assert NOTHING in str(compare(lambda x: jnp.arange(3), NUMBERS))
