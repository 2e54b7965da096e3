"""Values that reverse mode alone differentiates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import Array
from jax.interpreters import ad, batching, mlir


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def in_reverse_mode(message: str, x: Array) -> Array:
    """Returns `x`, whose derivatives are those of the identity in reverse mode.

    Operands of a `jax.custom_vjp` go through it: forward mode (`jax.jvp`, `jax.jacfwd`,
    `jax.linearize`) then raises NotImplementedError with this message, in place of JAX's TypeError.

    Args:
      message: what to do instead.
      x: floating.
    """
    del message
    return x


@in_reverse_mode.defjvp
def _(message: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], _tangent_p.bind(tangents[0], message=message)


def _reject(*_: Any, message: str) -> Any:
    raise NotImplementedError(message)


# The identity of tangents. Transposition, which is reverse mode, leaves nothing of it; it is
# evaluated or lowered in forward mode alone.
_tangent_p = jex_core.Primitive("in_reverse_mode")
_tangent_p.def_abstract_eval(lambda x, message: x)
_tangent_p.def_impl(_reject)
mlir.register_lowering(_tangent_p, _reject)
ad.deflinear2(_tangent_p, lambda cotangent, x, message: [cotangent])
batching.primitive_batchers[_tangent_p] = lambda operands, axes, message: (
    _tangent_p.bind(*operands, message=message),
    *axes,
)
