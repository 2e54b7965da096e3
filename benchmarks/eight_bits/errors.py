"""Errors of one matmul in 8 bits and of its gradients, beside float64."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.eight_bits.report import Table
from policy.core.dtypes import scaled_matmul_of
from policy.eight_bits.scaled_matmul import scaled_dot_general

SIZE = 512
SPREAD = 4.0  # rows are multiplied by exp(SPREAD n), n normal
NUMBERS = (((1,), (0,)), ((), ()))
HEADER = ("", "result", "gradient of the input", "gradient of the weight", "worst row of a spread")


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of matmul.

    Attributes:
      name: as the table shows it.
      text: of its `ScaledMatmul`; "" is bfloat16.
      result, gradient, worst_row: the largest errors allowed. A worst row of None should be lost,
        with an error above 0.9, as one scale is too coarse for it.
    """

    name: str
    text: str
    result: float
    gradient: float
    worst_row: float | None


CASES = (
    Case("bfloat16", "", 0.005, 0.005, 0.005),
    Case("float8, by row", "f8", 0.045, 0.065, 0.065),
    Case("float8, `tensor`", "f8:tensor", 0.045, 0.065, None),
    Case("int8, by row", "i8", 0.015, 0.065, 0.065),
    Case("int8, `tensor`", "i8:tensor", 0.02, 0.065, None),
    Case("mxfp8", "mxfp8", 0.045, 0.045, 0.065),
    Case("mxfp8_up", "mxfp8_up", 0.04, 0.04, 0.065),
    Case("nvfp4", "nvfp4", 0.15, 0.15, None),
)


@dataclasses.dataclass(frozen=True)
class Errors:
    """Norms of errors relative to norms of truths; `worst_row` is the largest of the rows'."""

    result: float
    input_gradient: float
    weight_gradient: float
    worst_row: float


def _matmul(text: str, x: jax.Array, w: jax.Array) -> jax.Array:
    by = scaled_matmul_of(text) if text else None
    if by is None:
        return lax.dot_general(x, w, NUMBERS)
    return scaled_dot_general(x, w, NUMBERS, by).astype(x.dtype)


def _relative(found: jax.Array, truth: np.ndarray, axis: int | None = None) -> np.ndarray:
    off = np.asarray(found, np.float64) - truth
    return np.asarray(np.linalg.norm(off, axis=axis) / np.linalg.norm(truth, axis=axis))


def measure(case: Case, size: int = SIZE) -> Errors:
    """Returns the errors of a matmul of Gaussian bfloat16 operands, size x size x size.

    The operands' own rounding to bfloat16 is not an error. Rows of the last figure's left operand
    are multiplied by exp(4 n), n normal.
    """
    rng = np.random.default_rng(0)
    draws = [rng.standard_normal((size, size)) for _ in range(3)]
    spread = draws[0] * np.exp(SPREAD * rng.standard_normal((size, 1)))
    x, w, cotangent, rows = (jnp.asarray(draw, jnp.bfloat16) for draw in (*draws, spread))
    run = functools.partial(_matmul, case.text)

    @jax.jit
    def both(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
        y, pullback = jax.vjp(run, x, w)
        return y, *pullback(cotangent)

    y, dx, dw = both(x, w, cotangent)
    wide_x, wide_w, wide_ct, wide_rows = (
        np.asarray(array, np.float64) for array in (x, w, cotangent, rows)
    )
    return Errors(
        float(_relative(y, wide_x @ wide_w)),
        float(_relative(dx, wide_ct @ wide_w.T)),
        float(_relative(dw, wide_x.T @ wide_ct)),
        float(_relative(jax.jit(run)(rows, w), wide_rows @ wide_w, axis=1).max()),
    )


def missed(case: Case, errors: Errors) -> list[str]:
    """Returns the bounds that a matmul misses, a line each."""
    gradient = max(errors.input_gradient, errors.weight_gradient)
    bounds = {
        "result": (errors.result, case.result),
        "gradients": (gradient, case.gradient),
        "worst row": (errors.worst_row, math.inf if case.worst_row is None else case.worst_row),
    }
    found = [
        f"{case.name}, {what}: an error of {error:.3f}, bound {bound:g}"
        for what, (error, bound) in bounds.items()
        if not round(error, 3) <= bound
    ]
    if case.worst_row is None and not errors.worst_row > 0.9:
        found.append(f"{case.name}, worst row: an error of {errors.worst_row:.3f}, below 0.9")
    return found


def table() -> Table:
    """Measures every case."""
    found = {case: measure(case) for case in CASES}
    rows = tuple(
        (case.name, *(f"{error:.3f}" for error in dataclasses.astuple(errors)))
        for case, errors in found.items()
    )
    lines = [line for case, errors in found.items() for line in missed(case, errors)]
    return Table(HEADER, rows, tuple(lines))
