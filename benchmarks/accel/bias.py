"""A bias added to the float32 accumulator and rounded once, beside Flax's sum of two bfloat16
arrays.

    python -m benchmarks.accel.bias             # v5e, v6e and H100: 4 minutes on two idle cores
    python -m benchmarks.accel.bias --on h100   # one chip's rows

Flax's layers, and so ours, round a matmul or a convolution to bfloat16 and add the rounded bias: up
to 1.5 ulp. In the accumulator it would be 0.5. The rows are of value_and_grad of the mean square:
with the bias in the accumulator / added to the rounded product.

TPUs fuse either, and the accumulator saves 0 to 4% of the cycles. XLA for GPUs writes the
accumulator, or the activation's derivative, to memory: 1 to 9% more bytes with Triton's matmuls, 21
to 22% with cuBLASLt's, 66% of a convolution (H100). So the layers add their bias as Flax's do.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.report import rows_of
from benchmarks.accel.targets import Target, chosen
from benchmarks.table import Row, run
from mpmodules.functions.functional import add_bias, trailing
from policy.functions.checkpointing import materialized
from policy.functions.reductions import accumulating

TARGETS = ("v5e:1x1", "v6e:1x1", "h100")
OTHERS = ("v5p:1x1x1", "tpu7x:1x1x1", "a100", "b200")
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
HALF = jnp.bfloat16
Bilinear = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers with a bias, one after the other.

    Attributes:
      inputs: the shape of the bfloat16 input.
      kernels: the float32 kernels' shapes.
      operation: of input and kernel.
      activation: of the first layer's result.
    """

    name: str
    inputs: tuple[int, ...]
    kernels: tuple[tuple[int, ...], ...]
    operation: Bilinear
    activation: Callable[[jax.Array], jax.Array]


def _matmul(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **options)


def _convolution(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout, **options)


CASES = (
    Case("Dense", (16384, 256), ((256, 256),), _matmul, lambda x: x),
    Case("Dense, relu", (16384, 256), ((256, 256),), _matmul, jax.nn.relu),
    Case("Dense, gelu, Dense", (16384, 384), ((384, 1536), (1536, 384)), _matmul, jax.nn.gelu),
    Case("Conv, relu", (64, 28, 28, 128), ((3, 3, 128, 128),), _convolution, jax.nn.relu),
)


def to_rounded(operation: Bilinear, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """The layers' own program: the rounded bias is added to the rounded product."""
    product, added = operation(x, kernel), bias.astype(x.dtype)
    return add_bias(product, added, trailing(product, bias), stored=bias)


def to_accumulator(
    operation: Bilinear, x: jax.Array, kernel: jax.Array, bias: jax.Array
) -> jax.Array:
    """The bias is added to the float32 accumulator, and the sum is rounded; backward multiplies
    half by half.
    """
    accumulator = accumulating(operation, jnp.float32)(x, kernel)
    return _rounded(accumulator + bias.reshape(trailing(accumulator, bias)))


@jax.custom_jvp
def _rounded(y: jax.Array) -> jax.Array:
    return y.astype(HALF)


@_rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _rounded(primals[0]), materialized(tangents[0].astype(HALF))


def figures(
    target: Target, case: Case, adds: Callable[..., jax.Array], options: dict[str, Any]
) -> Figures:
    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for i, (kernel, bias) in enumerate(params):
            x = adds(case.operation, x, kernel.astype(HALF), bias)
            x = case.activation(x) if i == 0 else x
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = [(shape(kernel), shape(kernel[-1:])) for kernel in case.kernels]
    arguments = (params, jax.ShapeDtypeStruct(case.inputs, HALF))
    step = jax.value_and_grad(loss, argnums=(0, 1))
    return measure(target, step, placed(target, arguments), compiler_options=options)


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of cases' names.
    """
    for target in chosen(on, TARGETS[:1] if small else TARGETS, OTHERS):
        routes: dict[str, dict[str, Any]] = {"": {}}
        if target.chip.platform == "cuda":
            routes |= {", without Triton": WITHOUT_TRITON}
        for case in CASES:
            if only and not any(part in case.name for part in only):
                continue
            for route, options in routes.items():
                wide, narrow = (
                    figures(target, case, adds, options) for adds in (to_accumulator, to_rounded)
                )
                yield from rows_of(f"{case.name}{route}", target, wide, narrow)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "rounded"))
