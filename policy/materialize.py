"""A half-precision array that XLA for GPUs writes once and reads in half, rather than keep what it was rounded from.

XLA drops a cast to half precision that a cast to float32 follows. On a GPU, where a matmul's operands lie in memory,
the cotangent that a matmul reads in half and a bias's gradient sums in float32 is then written twice: in half, and in
float32. On a TPU both are fused into what makes the cotangent, and there is nothing to hold up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.interpreters import ad, batching, mlir

_materialize_p = jex_core.Primitive("materialize")


def materialized(x: jax.Array) -> jax.Array:
    """`x` itself; a program for GPUs keeps it in memory in its own dtype. Linear: so is its cotangent."""
    return _materialize_p.bind(x)


def _transpose(cotangent: Any, x: Any) -> list[Any]:
    return [cotangent if isinstance(cotangent, ad.Zero) else materialized(cotangent)]


_materialize_p.def_impl(lambda x: x)
_materialize_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_materialize_p, _transpose)
batching.defvectorized(_materialize_p)
mlir.register_lowering(_materialize_p, lambda context, x: [x])
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        _materialize_p, mlir.lower_fun(lax.optimization_barrier, multiple_results=False), platform=_platform
    )
