"""Layers alone under mixed_bfloat16 as TPUs and GPUs get them, beside Flax's with dtype=bfloat16.

    python -m benchmarks.accel.layers          # v5e, v6e and H100: 10 minutes on two idle cores
    python -m benchmarks.accel.layers --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.layers --on v5e --only LayerNorm  # one chip's rows, and one layer's
    python -m benchmarks.accel.layers --small  # some layers of linen: a minute

value_and_grad of the mean square of a layer's result, by params and by a bfloat16 input, compiled
for one chip and not run: the layers of `benchmarks.layers`, of larger inputs. The quantities are
those of `benchmarks.accel.models`. An RNN's loop counts as often as it runs. A kernel that the
compiler gives no cycles for counts at the chip's roofline and is named. Attention is measured
without its kernel too, so that the kernel does not hide the operations around it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import layers
from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.report import rows_of
from benchmarks.accel.targets import Target, chosen
from benchmarks.layers import Case, layer
from benchmarks.models import APIS, REFERENCE
from benchmarks.table import Row, run

TARGETS = ("v5e:1x1", "v6e:1x1", "h100")
OTHERS = ("v5p:1x1x1", "tpu7x:1x1x1", "a100", "b200")
BOUNDS: dict[str, float | None] = {"cycles": 1.05}
# A repair that costs: v5e's reduce-window takes 56 thousand cycles in float32 and 22 in bfloat16,
# whose mean of 128x128 ones is 0.25; by hand reads the input ahead besides, which the compiler
# gives no cycles for.
DEARER: dict[str, dict[str, float | None]] = {"avg_pool": {"cycles": 1.13}}
ROWS, IMAGE, SEQUENCE = (16384, 256), (64, 56, 56, 16), (32, 512, 256)
SMALL = ("Dense", "LayerNorm", "BatchNorm", "avg_pool")


def cases() -> list[Case]:
    """Returns every layer."""
    embed = layer(
        "Embed",
        SEQUENCE[:2],
        lambda w, **o: w.Embed(8192, 256, **o),
        lambda w, **o: w.Embed(8192, 256, **o),
        "gradients of a token's uses are summed in float32",
    )
    return [
        *layers.cases(ROWS, IMAGE, SEQUENCE, groups=SEQUENCE, steps=SEQUENCE),
        layer(
            "InstanceNorm",
            IMAGE,
            lambda w, **o: w.InstanceNorm(**o),
            lambda w, **o: w.InstanceNorm(IMAGE[-1], **o),
            layers.NORM,
        ),
        dataclasses.replace(embed, integers=True),
        layer("avg_pool beside float32", IMAGE, _pool, _pool, layers.POOL),
        layer("attention in XLA", SEQUENCE, _linen_attention, _nnx_attention, layers.ATTENTION),
    ]


# By hand in float32 it computes the same: the sums of `avg_pool` by hand are in bfloat16.
def _pool(api: Any, rngs: Any = None, **options: Any) -> Any:
    def by_hand(x: jax.Array) -> jax.Array:
        return api.avg_pool(x.astype(jnp.float32), (2, 2), (2, 2)).astype(x.dtype)

    return by_hand if "dtype" in options else lambda x: api.avg_pool(x, (2, 2), (2, 2))


# Where attention is one kernel its cycles are a roofline: without it the bound is to hold as well.
def _linen_attention(api: Any, **options: Any) -> Any:
    return api.MultiHeadDotProductAttention(
        4, use_bias=False, deterministic=True, **_in_xla(api, options)
    )


def _nnx_attention(api: Any, **options: Any) -> Any:
    return api.MultiHeadAttention(
        4, SEQUENCE[-1], use_bias=False, decode=False, **_in_xla(api, options)
    )


def _in_xla(api: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Adds the option that turns our fused kernel off; Flax's layers, which are given a dtype, have
    none.
    """
    if "dtype" in options:
        return options
    return options | {
        "attention_fn": functools.partial(api.dot_product_attention, implementation="xla")
    }


def figures(target: Target, case: Case, api: str, *, ours: bool) -> Figures:
    program = case.program(api, ours=ours)
    return measure(
        target, program.step, tuple(placed(target, argument) for argument in program.arguments)
    )


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of layers' names.
    """
    for target in chosen(on, ("v5e:1x1", "h100") if small else TARGETS, OTHERS):
        for case in cases():
            if (small and case.name not in SMALL) or (
                only and not any(part in case.name for part in only)
            ):
                continue
            for api in APIS[:1] if small else APIS:
                ours, hand = (figures(target, case, api, ours=ours) for ours in (True, False))
                bounds = BOUNDS | DEARER.get(case.name, {})
                yield from rows_of(f"{case.name}, {api}", target, ours, hand, bounds, case.repair)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, REFERENCE))
