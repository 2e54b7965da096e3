"""Programs of integers, choices and draws in half precision with nothing wrong in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import audit
from tests.policy.inspect.audit.discrete_faults import KEY, MANY, positions
from tests.policy.inspect.audit.faults import BF16, F16, F32
from tests.policy.inspect.audit.near_misses import shape

NARROW, HALF, ROWS = shape(4, 1, dtype=BF16), shape(4, MANY, dtype=BF16), shape(4, 8)
CLEAN: dict[str, tuple[Any, ...]] = {
    "positions in float32": (lambda x: (x.astype(F32) * positions(F32)[None]).astype(BF16), NARROW),
    "few positions": (lambda x: x * positions(BF16, 256)[None], NARROW),
    "positions that float16 has": (
        lambda x: x * positions(F16, 2048)[None],
        shape(4, 1, dtype=F16),
    ),
    "a size that bfloat16 has not": (lambda x: x * 513, NARROW),
    "a mask as numbers": (lambda x: x * (x > 0).astype(BF16), HALF),
    "a mask of a large number": (lambda x: jnp.where(x > 0, x, -1e9).astype(BF16), HALF),
    "bytes of an image": (lambda x: x.astype(BF16) / 255, shape(4, MANY, dtype=jnp.uint8)),
    "labels that are not known": (lambda x: x.astype(BF16), shape(MANY, dtype=jnp.int32)),
    "positions modulo a small size": (
        lambda x: x * (jnp.arange(MANY) % 16).astype(BF16)[None],
        NARROW,
    ),
    "positions that are clipped": (
        lambda x: x * jnp.clip(jnp.arange(MANY), 0, 128).astype(BF16)[None],
        NARROW,
    ),
    "activations times positions": (
        lambda x: (x * positions(F32)[None]).astype(BF16),
        shape(4, MANY),
    ),
    "one hot of many classes": (
        lambda x: jax.nn.one_hot(x, MANY, dtype=BF16),
        shape(8, dtype=jnp.int32),
    ),
    "the largest of logits": (lambda x: jnp.argmax(x, -1), ROWS),
    "the largest of half logits": (lambda x: lax.top_k(x, 2), HALF),
    "rounded numbers in order": (lambda x: jnp.sort(x.astype(BF16)), ROWS),
    "a rare event drawn in float32": (
        lambda x: jnp.where(jax.random.uniform(KEY, x.shape) < 0.001, 0, x),
        HALF,
    ),
    "dropout by hand in half": (
        lambda x: jnp.where(jax.random.uniform(KEY, x.shape, x.dtype) < 0.9, x, 0),
        HALF,
    ),
    "a comparison of activations": (lambda x: jnp.where(x < 0.001, 0, x), HALF),
    "products of arrays added": (
        lambda x: x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3],
        shape(4, 8, dtype=F16),
    ),
    "an inner product of two arrays": (jnp.vdot, shape(8, dtype=F16), shape(8, dtype=F16)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_there_is_no_finding(name):
    function, *arguments = CLEAN[name]
    report = audit(function, *arguments)
    assert report.operations and not report.findings, str(report)
