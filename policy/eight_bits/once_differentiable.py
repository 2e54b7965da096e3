"""Derivatives that can't be differentiated again: only 8-bit operands are saved for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_jvp
def mark(x: jax.Array) -> jax.Array:
    """Returns an array of no bytes whose derivative is not known to be zero where that of `x` is
    not: see `differentiated_once`.
    """
    return jnp.zeros((0,), x.dtype)


@mark.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return mark(*primals), mark(*tangents)


@jax.custom_jvp
def differentiated_once(cotangent: jax.Array, *marks: jax.Array) -> jax.Array:
    """Returns a cotangent. Its derivative, and that by what the marks depend on, is an error: the
    operands' values that it would need are not saved.
    """
    del marks
    return cotangent


@differentiated_once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "The gradient of an 8-bit matmul can't be differentiated again, because only its 8-bit "
        "operands are saved. Take second derivatives under a policy without m=, or exclude the "
        "layer with a rule."
    )
