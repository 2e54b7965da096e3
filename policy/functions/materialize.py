"""Half-precision arrays that XLA for GPUs writes to memory in half precision.

XLA drops a cast to half precision that is followed by a cast to float32. On a GPU the operands of a
matmul are in memory. A cotangent that a matmul reads in half precision and a bias gradient sums in
float32 is then written twice, once in each dtype. On a TPU both readers are fused with the producer
of the cotangent, and no barrier is needed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.interpreters import ad, batching, mlir

_materialize_p = jex_core.Primitive("materialize")


def materialized(x: jax.Array) -> jax.Array:
    """Returns `x` unchanged; programs for GPUs keep it in memory in its own dtype.

    It is linear, and its cotangent is materialized too.
    """
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
        _materialize_p,
        mlir.lower_fun(lax.optimization_barrier, multiple_results=False),
        platform=_platform,
    )
