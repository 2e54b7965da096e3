"""Decode steps with caches of keys and values in 8 bits beside bfloat16.

    python -m benchmarks.accel.cache             # v5e: two minutes
    python -m benchmarks.accel.cache --on v6e    # another chip
    python -m benchmarks.accel.cache --small     # the smallest cache
    python -m benchmarks.accel.cache --check     # exits with 1 where a ratio misses its bound

One step of an nnx attention layer with 32 query heads, compiled and not run: its cache is donated.
Rows of bytes are those of the arguments, the cache and the layer's weights, which hold a whole
cache in 8 bits and its scales; temporary memory has no room for a widened one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.targets import Target, chosen
from benchmarks.table import Row, run
from mpmodules import nnx
from policy import use_policy

TARGETS = ("v5e:1x1",)
OTHERS = ("v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1", "h100", "a100", "b200")
REFERENCE = "p=bf16,c=bf16,o=bf16"
POLICIES = {"int8": f"{REFERENCE},k=i8", "float8": f"{REFERENCE},k=f8"}
HEADS = 32
CACHES = {  # batch, length, key heads, head width
    "8 x 8192, 8 heads of 128": (8, 8192, 8, 128),
    "1 x 8192, 8 heads of 128": (1, 8192, 8, 128),
    "8 x 8192, 8 heads of 64": (8, 8192, 8, 64),
}
# Of bfloat16's cycles. In the second, nine tenths are the projections, and seven kernels more,
# which quantize and widen scales, have 1800 cycles each.
BOUNDS = 0.60, 1.025, 0.95


def figures(target: Target, policy: str, cache: tuple[int, ...]) -> Figures:
    """Returns the figures of a decode step of one layer."""
    batch, length, key_heads, head_width = cache
    width = HEADS * head_width

    def model() -> Any:
        with use_policy(policy):
            layer = nnx.MultiHeadAttention(
                *(HEADS, width),
                num_kv_heads=key_heads,
                use_bias=False,
                decode=True,
                rngs=nnx.Rngs(0),
            )
        layer.init_cache((batch, length, width))
        return layer

    graph, held, params = flax_nnx.split(flax_nnx.eval_shape(model), flax_nnx.Cache, ...)

    def step(held: Any, params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        layer = flax_nnx.merge(graph, held, params)
        y = layer(x)
        return flax_nnx.state(layer, flax_nnx.Cache), y

    x = jax.ShapeDtypeStruct((batch, 1, width), jnp.bfloat16)
    return measure(target, step, placed(target, (held, params, x)), donated=(0,))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Every row, as its programs are compiled.

    Args:
      small: the smallest cache alone.
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    caches = [*CACHES.items()]
    for target in chosen(on, TARGETS, OTHERS):
        for i, (shape, cache) in enumerate(caches[1:2] if small else caches):
            hand = figures(target, REFERENCE, cache)
            for name, policy in POLICIES.items():
                called = f"{name}, {shape}"
                if only and not any(part in called for part in only):
                    continue
                ours, where = figures(target, policy, cache), target.name
                yield Row("memory", called, ours.memory, hand.memory, target=where)
                yield Row("bytes", called, ours.moved, hand.moved, target=where)
                if target.chip.clock:
                    bound = None if small else BOUNDS[i]
                    yield Row("cycles", called, ours.cycles, hand.cycles, bound, target=where)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "bfloat16"))
