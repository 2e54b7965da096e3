"""Programs of matmuls in 8 bits, as a TPU v5e and an H100 get them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.accel import eight_bits
from benchmarks.accel.program import placed
from mpmodules import linen
from policy.inspect.estimate.targets import Target
from tests.benchmarks import accelerators

WIDTH = 512


def program(target: Target, text: str) -> str:
    """Returns the optimised program of a Dense, forward and backward."""
    layer = linen.Dense(WIDTH, use_bias=False, dtype_policy=text)
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)

    def step(params: Any, x: jax.Array, ct: jax.Array) -> tuple[Any, ...]:
        y, pullback = jax.vjp(layer.apply, params, x)
        return y, *pullback(ct)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        traced = jax.jit(step).trace(*placed(target, (params, x, x)))
        platforms = (target.chip.platform,)
        return str(traced.lower(lowering_platforms=platforms).compile().as_text())


def test_a_tpu_multiplies_int8_by_int8_three_times():
    text = program(accelerators.target("v5e:1x1"), eight_bits.POLICIES["int8"])
    products = re.findall(r"= s32\[\S* convolution\(", text)
    assert len(products) == 3


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_an_h100_multiplies_8_bits_by_8_bits_three_times(kind):
    text = program(accelerators.target("h100"), eight_bits.POLICIES[kind])
    dtype = {"float8": r"f8e\w+", "int8": "s8"}[kind]
    fusions = re.findall(rf"gemm_fusion\S*computation \(\S+ {dtype}\[\S+ \S+ {dtype}\[", text)
    assert len(fusions) == 3


def test_rows_are_beside_bfloat16():
    accelerators.target("v5e:1x1")
    rows = list(eight_bits.rows(small=True, only=["int8"]))
    assert [(row.quantity, row.name, row.target) for row in rows] == [
        ("cycles", "int8, 1024", "v5e:1x1")
    ]
    assert rows[0].ratio > 1  # too small to gain
