"""Outputs that are no floats: integers and booleans that differ, complex numbers, and what can't be
measured.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.inspect.compare.compare import compare
from policy.inspect.suggest.suggest import suggest

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(64, 512)), F32)
NOTHING = "Nothing differs from float32"


def test_an_argmax_of_half_precision_is_reported_with_the_share_that_differs() -> None:
    comparison = compare(lambda x: jnp.argmax(x.astype(BF16), -1), X)
    (row,) = comparison.outputs
    half, truth = (np.argmax(np.asarray(x, F32), -1) for x in (X.astype(BF16), X))
    share = float(np.mean(half != truth))
    assert row.error == comparison.error == pytest.approx(share) and share > 0
    assert row.dtype == "int32"
    assert NOTHING not in str(comparison) and f"{share:.2%} of the int32 differ" in str(comparison)


DIFFERING = np.asarray(X.astype(BF16) > 1) != np.asarray(X > 1)


def test_integers_and_booleans_that_leave_a_module_have_rows_too() -> None:
    def routed(x: Any) -> Any:
        with jax.named_scope("router"):
            _, experts = jax.lax.top_k(x.astype(BF16), 4)
        with jax.named_scope("mask"):
            positive = x.astype(BF16) > 1.0
        return jnp.sum(experts, -1), positive, x[:, 0] > 0

    comparison = compare(routed, X)
    assert [row.dtype for row in comparison.outputs] == ["int32", "bool", "bool"]
    assert comparison["router"].error > 0 and comparison.outputs[0].error > 0
    assert comparison["mask"].error == np.mean(DIFFERING) and comparison.outputs[2].error == 0


def test_the_share_that_differs_in_each_step_of_a_scan_is_in_its_steps() -> None:
    def scanned(x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            with jax.named_scope("choice"):
                return carry, row.astype(BF16) > 1.0

        return jax.lax.scan(step, 0, x)[1]

    steps = compare(scanned, X)["choice"].steps
    np.testing.assert_allclose(steps, np.mean(DIFFERING, -1), rtol=1e-6)


def test_complex_outputs_have_the_error_of_complex_vectors() -> None:
    def spectrum(x: Any) -> Any:
        with jax.named_scope("spectrum"):
            return jnp.fft.fft(x.astype(BF16).astype(F32))

    comparison = compare(spectrum, X)
    half, truth = (np.fft.fft(np.asarray(x, np.float64)) for x in (X.astype(BF16), X))
    error = np.linalg.norm(half - truth) / np.linalg.norm(truth)
    np.testing.assert_allclose([comparison.error, comparison["spectrum"].error], error, rtol=1e-3)
    assert comparison.outputs[0].dtype == "complex64" and comparison.outputs[0].cosine < 1
    found = suggest(spectrum, X, error=1e-4)
    assert found.paths == ("spectrum",) and found.without == pytest.approx(error, rel=1e-3)


def test_eight_bit_floats_are_measured() -> None:
    comparison = compare(lambda x: x.astype(jnp.float8_e4m3fn), X)
    assert comparison.outputs[0].dtype == "float8_e4m3fn" and 0.01 < comparison.error < 0.1


def test_nothing_differs_is_said_only_of_what_was_measured() -> None:
    key = compare(lambda x: jax.random.key(0), X)
    assert key.rows == () and key.notes == (
        "Nothing was measured: neither a module nor the function returns numbers.",
    )
    both = compare(lambda x: (x, jax.random.key(0)), X)
    assert both.notes == ("No measured value differs from float32; 1 outputs were not measured.",)
    undefined = compare(lambda x: jnp.log(-jnp.abs(x)), X)
    assert NOTHING not in str(undefined) and "float32 itself is infinite or NaN" in str(undefined)
    assert NOTHING in str(compare(lambda x: jnp.arange(3), X))
