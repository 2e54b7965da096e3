"""A matmul with an unrounded float32 result, beside the same matmul rounded to bfloat16.

    python -m benchmarks.accel.unrounded          # v5e: half a minute
    python -m benchmarks.accel.unrounded --check  # exits with 1 where a ratio misses its bound

A kernel and inputs of 4096 x 4096 under mixed_bfloat16, compiled for one chip and not run. The
result is unrounded by `preferred_element_type` of a line of the module's own code, or by
``o=float32`` of an inner Dense. Forward it is the program's result; forward and backward are
value_and_grad of its mean square, by kernel and input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.accel.targets import Target, chosen  # first: it sets what JAX reads

# isort: split
import jax
import jax.numpy as jnp

from benchmarks.accel.program import Figures, half, measure, placed
from benchmarks.accel.report import rows_of
from benchmarks.table import Row, run
from mpmodules import linen as nn

TARGETS, OTHERS = ("v5e:1x1",), ("v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1", "h100")
SIZE = 4096
BOUNDS = {"cycles": 1.05, "bytes": 1.13}  # a result of four bytes, each time it is written or read


class Ways(nn.Module):
    """One matmul, and how its result is asked for."""

    way: str = "rounded"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.way == "o=float32":
            return nn.Dense(SIZE, use_bias=False, dtype_policy="p=f32,c=bf16,o=f32")(x)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (SIZE, SIZE))
        asked = jnp.float32 if self.way == "preferred_element_type=float32" else None
        return jnp.dot(x, kernel, preferred_element_type=asked)


def figures(target: Target, way: str, *, backward: bool) -> Figures:
    model = Ways(way, dtype_policy="p=f32,c=bf16" if way == "rounded" else "mixed_bfloat16")
    x = half((SIZE, SIZE))
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def result(params: Any, x: jax.Array) -> Any:
        return model.apply(params, x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(result(params, x).astype(jnp.float32)))

    function = jax.value_and_grad(loss, (0, 1)) if backward else result
    return measure(target, function, placed(target, (params, x)))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    for target in chosen(on, TARGETS, OTHERS):
        bounds = BOUNDS if target.name.startswith("v5e") else {}
        for backward in (False, True):
            rounded = figures(target, "rounded", backward=backward)
            for way in ("preferred_element_type=float32", "o=float32"):
                name = f"{way}, {'forward and backward' if backward else 'forward'}"
                if only and not any(part in name for part in only):
                    continue
                ours = figures(target, way, backward=backward)
                yield from rows_of(name, target, ours, rounded, bounds)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "rounded"))
