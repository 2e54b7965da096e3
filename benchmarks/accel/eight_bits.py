"""Matmuls in 8 bits beside bfloat16, of a Dense from 1024 to 8192 wide, and two convolutions.

    python -m benchmarks.accel.eight_bits            # v5e, v6e, tpu7x and H100: 3 minutes
    python -m benchmarks.accel.eight_bits --on v5e   # one chip's rows
    python -m benchmarks.accel.eight_bits --check    # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.eight_bits --small    # the smallest width

Forward and backward, by input and kernel, of a Dense of N inputs, N outputs and N rows under
mixed_float8 and mixed_int8, beside mixed_bfloat16, compiled and not run; on v5e also of 3x3
convolutions of 64 images in int8. Cycles of TPUs are the compiler's own;
H100's compiler tells none, so that its rows are bytes, and the dtypes of its matmuls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.targets import Target, chosen
from benchmarks.table import Row, run
from mpmodules import linen
from policy.core.messages import DtypePolicyWarning

TARGETS = ("v5e:1x1", "v6e:1x1", "tpu7x:1x1x1", "h100")
OTHERS = ("v5p:1x1x1", "b200")
WIDTHS = (1024, 2048, 4096, 8192)
REFERENCE = "p=f32,c=bf16,o=bf16"
POLICIES = {"float8": f"{REFERENCE},m=f8", "int8": f"{REFERENCE},m=i8"}
IMAGES = {"28x28x256": (64, 28, 28, 256), "14x14x1024": (64, 14, 14, 1024)}


def figures(target: Target, policy: str, width: int) -> Figures:
    """Returns the figures of one Dense, forward and backward."""
    layer = linen.Dense(width, use_bias=False, dtype_policy=policy)
    return of_layer(target, layer, (width, width))


def of_convolution(target: Target, policy: str, shape: tuple[int, ...]) -> Figures:
    """Returns the figures of one 3x3 convolution that keeps its input's shape."""
    layer = linen.Conv(shape[-1], (3, 3), use_bias=False, dtype_policy=policy)
    return of_layer(target, layer, shape)


def of_layer(target: Target, layer: linen.Module, shape: tuple[int, ...]) -> Figures:
    """Returns the figures of a layer whose result has its input's shape, forward and backward."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def step(params: Any, x: jax.Array, ct: jax.Array) -> tuple[Any, ...]:
        y, pullback = jax.vjp(layer.apply, params, x)
        return y, *pullback(ct)

    with warnings.catch_warnings():  # the machine that compiles has no 8-bit matmuls
        warnings.simplefilter("ignore", DtypePolicyWarning)
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        return measure(target, step, placed(target, (params, x, x)))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    for target in chosen(on, TARGETS[:1] if small else TARGETS, OTHERS):
        quantity = "cycles" if target.chip.clock else "bytes"
        for width in WIDTHS[:1] if small else WIDTHS:
            hand = figures(target, REFERENCE, width)
            for name, policy in POLICIES.items():
                called = f"{name}, {width}"
                if only and not any(part in called for part in only):
                    continue
                ours = figures(target, policy, width)
                yield Row(
                    quantity,
                    called,
                    getattr(ours, quantity),
                    getattr(hand, quantity),
                    target=target.name,
                )
        if target.kind == "v5e" and not small:
            yield from _convolutions(target, only)


def _convolutions(target: Target, only: Sequence[str]) -> Iterator[Row]:
    for image, shape in IMAGES.items():
        called = f"int8, 3x3 Conv of {image}"
        if only and not any(part in called for part in only):
            continue
        texts = POLICIES["int8"], REFERENCE
        ours, hand = (of_convolution(target, text, shape) for text in texts)
        yield Row("cycles", called, ours.cycles, hand.cycles, target=target.name)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "bfloat16"))
