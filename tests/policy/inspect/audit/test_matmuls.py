"""Matmuls that are left in float32, and float32 that leaks into them: these depend on the rest of
the program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy import audit, full_precision
from policy.inspect.audit.finding_kinds import LEAK, MATMUL

BF16, F32 = jnp.bfloat16, jnp.float32


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def norm(x: Any) -> Any:
    """In float32, and left there."""
    with jax.named_scope("norm"):
        wide = x.astype(F32)
        wide = wide - wide.mean(-1, keepdims=True)
        return wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)


def found(fn: Any, *args: Any) -> list[tuple[str, str]]:
    return [(f.kind, f.path) for f in audit(fn, *args).findings]


HALF, WIDE = (shape(4, 4), shape(4, 4)), (shape(4, 8, dtype=F32), shape(8, 4, dtype=F32))


def test_a_float32_matmul_among_half_ones_is_found_with_its_share():
    (finding,) = audit(lambda a, b, c, d: (a @ b, c @ d), *HALF, *WIDE).findings
    assert (finding.kind, finding.dtypes) == (MATMUL, ("float32",))
    assert "with 66.7% of the FLOPs of all matmuls" in finding.message


def test_float32_matmuls_alone_are_as_they_were_meant():
    assert found(lambda c, d: c @ d, *WIDE) == []
    assert found(lambda x, w: x.astype(F32) @ w, shape(2, 8), WIDE[1]) == []


def test_an_island_of_float32_is_meant():
    island = full_precision(lambda a, b: a.astype(F32) @ b.astype(F32))
    assert found(lambda a, b: island(a, b).astype(BF16) @ b, *HALF) == []


def test_outer_products_and_stored_matrices_times_one_vector_are_no_work():
    def fn(a, b, weight, u):
        angles = jnp.einsum("t,f->tf", jnp.arange(8.0), jnp.ones(4))
        return a @ b, angles, u @ weight

    assert found(fn, *HALF, shape(8, 4, dtype=F32), shape(1, 8, dtype=F32)) == []


@pytest.mark.parametrize(
    "weight_in", (BF16, F32), ids=("a half weight, widened", "a float32 weight")
)
def test_a_norm_that_is_not_narrowed_leaks_into_a_matmul(weight_in):
    def fn(x, w):
        with jax.named_scope("head"):
            return norm(x) @ w.astype(F32)

    assert found(fn, shape(2, 4), shape(4, 4, dtype=weight_in)) == [(LEAK, "head/norm")]
    both = found(
        lambda x, w, a, b: (fn(x, w), a @ b), shape(2, 4), shape(4, 4, dtype=weight_in), *HALF
    )
    assert both == [(LEAK, "head/norm"), (MATMUL, "head")]


def test_a_norm_that_is_narrowed_does_not():
    assert found(lambda x, w: jax.nn.gelu(norm(x)).astype(BF16) @ w, shape(2, 4), shape(4, 4)) == []


def test_what_is_only_prepared_in_float32_is_no_leak():
    fn = lambda x, w: (x.astype(F32) / 255.0 - 0.5) @ w  # noqa: E731
    assert found(fn, shape(2, 4), shape(4, 4, dtype=F32)) == []
