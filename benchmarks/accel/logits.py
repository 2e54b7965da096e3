"""The loss of a last linear layer in chunks, beside the loss of its float32 logits.

    python -m benchmarks.accel.logits            # v5e: 2 minutes on an idle core
    python -m benchmarks.accel.logits --on v5p   # another chip's rows
    python -m benchmarks.accel.logits --check    # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.logits --small    # the fewest tokens

Value and gradients of `policy.losses.linear_softmax_cross_entropy` under mixed_bfloat16, compiled
for one chip and not run: bfloat16 inputs of width 4096, and a float32 kernel of Llama 3's 128256
tokens. Beside it, a bfloat16 matmul with a float32 result and
`policy.losses.softmax_cross_entropy_with_integer_labels`, whose temporary memory is the logits. Of
ours, 1.05 GB is a bfloat16 copy of the kernel, which XLA makes before the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.accel.targets import Target, chosen  # first: it sets what JAX reads

# isort: split
import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.accel.program import Figures, half, measure, placed
from benchmarks.accel.report import rows_of
from benchmarks.table import Row, run
from policy import losses, use_policy

TARGETS, OTHERS = ("v5e:1x1",), ("v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1", "h100")
WIDTH, CLASSES = 4096, 128256
TOKENS = (4096, 8192, 16384)
BOUNDS = {
    4096: {"cycles": 1.05},
    8192: {"cycles": 1.05, "temporary": 0.53},  # without the kernel 0.25
    16384: {"cycles": 1.0, "temporary": 0.27},
}


def by_logits(x: Array, kernel: Array, labels: Array) -> Array:
    dimensions = (((1,), (0,)), ((), ()))
    kernel = kernel.astype(jnp.bfloat16)
    logits = lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)
    return losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_chunks(x: Array, kernel: Array, labels: Array) -> Array:
    with use_policy("mixed_bfloat16"):
        return losses.linear_softmax_cross_entropy(x, kernel, labels)


def figures(target: Target, loss: Any, tokens: int) -> Figures:
    kernel = jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32)
    operands = half((tokens, WIDTH)), kernel, jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return measure(target, jax.value_and_grad(loss, (0, 1)), placed(target, operands))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    for target in chosen(on, TARGETS, OTHERS):
        for tokens in TOKENS[: 1 if small else None]:
            name = f"{tokens} tokens"
            if only and not any(part in name for part in only):
                continue
            ours, hand = (figures(target, loss, tokens) for loss in (in_chunks, by_logits))
            bounds = BOUNDS[tokens] if target.name.startswith("v5e") else {}
            yield from rows_of(name, target, ours, hand, bounds)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "logits"))
