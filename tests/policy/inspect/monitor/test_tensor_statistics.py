"""Statistics of arrays compared with NumPy's, in every dtype, at the ends of each range."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.inspect.monitor.tensor_statistics import named, statistics_of

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def statistics(array):
    """Returns the numbers of a row of one value."""
    found = jax.jit(statistics_of)(array)
    parts = 2 if jnp.issubdtype(array.dtype, jnp.complexfloating) else 1
    numbers = named(np.asarray(found)[None], np.array([parts * array.size]), array.dtype)
    return {name: float(number) for name, number in numbers.items()}


def reference(array: Any) -> dict[str, Any]:
    """Returns the same from float64 and casts of ml_dtypes in NumPy."""
    given: Any = np.asarray(array)
    if np.iscomplexobj(given):
        given = np.stack([given.real, given.imag])
    wide, info, size = given.astype(np.float64), jnp.finfo(given.dtype), max(given.size, 1)
    magnitude = np.abs(wide)
    finite = magnitude[np.isfinite(wide)]
    largest = finite.max(initial=0)

    def share(mask):
        return np.sum(mask) / size

    numbers = {
        "largest": largest,
        "mean_square": np.mean(finite**2) if finite.size else 0.0,
        "smallest": finite[finite > 0].min(initial=np.inf) if (finite > 0).any() else 0.0,
        "zeros": share(wide == 0),
        "nan": share(np.isnan(wide)),
        "inf": share(np.isinf(wide)),
        "below": share((finite > 0) & (finite < float(info.smallest_normal))),
        "above": share(finite == float(info.max)),
        "lost": 0.0,
    }
    return numbers


def edges(dtype):
    """Returns numbers at the ends of the ranges of dtypes, both signs, NaN and infinities."""
    found = [0.0, -0.0, 1.0, -3.0, 1e-3, np.inf, -np.inf, np.nan]
    for one in (jnp.float16, jnp.float8_e5m2, getattr(jnp, dtype)):
        info = jnp.finfo(one)
        for edge in (info.max, info.smallest_normal, info.smallest_subnormal):
            edge = np.float64(np.asarray(edge, np.float64))
            found += [edge, -edge, edge / 2, edge / 2 * (1 + 2**-9), edge * (1 + 2**-9)]
            found += [edge * (1 + 2**-5), edge * (1 + 2**-4), edge * (1 + 2**-3)]
    with np.errstate(all="ignore"):
        return np.array(found).astype(getattr(jnp, dtype))


CASES = {
    "edges": edges,
    "normal": lambda dtype: (
        np.random.default_rng(0).normal(size=(7, 9)).astype(getattr(jnp, dtype))
    ),
    "empty": lambda dtype: np.zeros((0, 3), getattr(jnp, dtype)),
    "zeros": lambda dtype: np.zeros((3, 3), getattr(jnp, dtype)),
    "number": lambda dtype: np.full((), 2, getattr(jnp, dtype)),
    "NaN alone": lambda dtype: np.full((4,), np.nan, getattr(jnp, dtype)),
}


@pytest.mark.cases(fast=1, slow=9)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_numpy(case, dtype):
    array = CASES[case](dtype)
    found, expected = statistics(jnp.asarray(array)), reference(array)
    assert set(found) == set(expected)
    for name, number in expected.items():
        rtol = 1e-6 if name == "mean_square" else 1e-12
        np.testing.assert_allclose(found[name], number, rtol=rtol, atol=1e-80, err_msg=name)


def test_statistics_of_float64_and_complex_numbers():
    with jax.enable_x64(True):
        for array in (edges("float32").astype(np.float64) * 1e110, np.array([1e-310, 2.0])):
            found, expected = statistics(jnp.asarray(array)), reference(array)
            for name, number in expected.items():
                np.testing.assert_allclose(found[name], number, rtol=1e-12, err_msg=name)
    array = np.array([3 + 4j, np.nan, 1e-41j, 0], np.complex64)
    found, expected = statistics(jnp.asarray(array)), reference(array)
    for name, number in expected.items():
        np.testing.assert_allclose(found[name], number, rtol=1e-6, atol=1e-80, err_msg=name)


@pytest.mark.slow
def test_squares_of_large_and_small_numbers_do_not_overflow():
    for scale in (1e30, 1e-30):
        array = np.full((5, 5), scale, np.float32)
        np.testing.assert_allclose(
            statistics(jnp.asarray(array))["mean_square"], float(np.float32(scale)) ** 2, rtol=1e-6
        )
