"""What the forward pass keeps in float32 for the backward pass."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from policy import audit
from policy.inspect.audit.finding_kinds import RESIDUAL

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def kept(activation: Any, dtype: Any = BF16) -> list[str]:
    def fn(w, x):
        with jax.named_scope("act"):
            h = activation(x @ w.astype(dtype))
        return h @ w.astype(dtype).T

    x, w = jax.ShapeDtypeStruct((8, 4), dtype), jax.ShapeDtypeStruct((4, 16), F32)
    assert all(finding.kind != RESIDUAL for finding in audit(fn, w, x).findings)
    return [
        f.message
        for f in audit(fn, w, x, backward=True).findings
        if f.kind == RESIDUAL and f.path == "act"
    ]


def saved(message: str) -> int:
    """The bytes that a message gives, by the number of arrays: JAX versions differ in how many."""
    found = re.match(r"([\d,]+) bytes in (\d+) float32 arrays? (is|are) saved", message)
    assert found is not None and int(found[2]) in (1, 2)
    total = int(found[1].replace(",", ""))
    assert total % int(found[2]) == 0
    return total // int(found[2])


def in_float32(function: Any) -> Any:
    return lambda h: function(h.astype(F32)).astype(h.dtype)


def test_an_activation_in_float32_keeps_float32_and_the_bytes_are_given():
    (message,) = kept(in_float32(jnp.tanh))
    assert saved(message) == 8 * 16 * 4 and "computed elementwise from bfloat16" in message


@pytest.mark.parametrize(
    "activation",
    (
        jnp.tanh,
        in_float32(jax.nn.softmax),
        in_float32(lambda h: h - h.mean(-1, keepdims=True)),
        in_float32(lambda h: h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)),
        in_float32(jax.nn.softplus),
        jax.checkpoint(in_float32(jnp.tanh)),
    ),
    ids=("in half", "a softmax", "a mean", "a norm", "an exponential", "computed again"),
)
def test_what_is_half_or_in_float32_for_a_reason_is_left_alone(activation):
    assert kept(activation) == []


def test_cubes_have_a_reason_in_float16_only():
    gelu = in_float32(jax.nn.gelu)
    assert kept(gelu) and not kept(gelu, F16)


def test_a_program_that_multiplies_in_float32_keeps_float32():
    def fn(w, x):
        return jnp.tanh(x.astype(F32) @ w).sum()

    x, w = jax.ShapeDtypeStruct((8, 4), BF16), jax.ShapeDtypeStruct((4, 16), F32)
    assert not audit(fn, w, x, backward=True).findings


def test_bytes_of_every_turn_of_a_loop_count():
    def fn(w, x):
        return jax.lax.scan(
            lambda h, _: (in_float32(jnp.tanh)(h @ w.astype(BF16)), None), x, None, length=5
        )[0]

    x, w = jax.ShapeDtypeStruct((8, 4), BF16), jax.ShapeDtypeStruct((4, 4), F32)
    (finding,) = [f for f in audit(fn, w, x, backward=True).findings if f.kind == RESIDUAL]
    assert saved(finding.message) == 5 * 8 * 4 * 4
