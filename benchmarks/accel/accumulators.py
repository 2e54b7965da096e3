"""Gradients that are accumulators, `grads="accumulator"`, beside those that were rounded.

    python -m benchmarks.accel.accumulators            # v5e and H100
    python -m benchmarks.accel.accumulators --on v5e   # one chip's rows
    python -m benchmarks.accel.accumulators --check    # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.accumulators --small    # one small model: half a minute

`policy.value_and_grad` of the loss, compiled and not run, of the linen models of
`benchmarks.accel.models` under mixed_bfloat16, beside the same with ``grads="float32"``. On a TPU
the batch is sharded over a topology of 2x2 chips, so that gradients are exchanged in the dtype of
the matmuls' results: float32, beside bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.accel.models import arguments, cases, small_cases
from benchmarks.accel.program import Figures, measure
from benchmarks.accel.report import rows_of
from benchmarks.accel.targets import Target, chosen
from benchmarks.models import Program
from benchmarks.table import Row, run
from policy import value_and_grad
from policy.grads.value_and_grad import GradientKind

TARGETS = ("v5e:2x2", "h100")
OTHERS = ("v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1", "a100", "b200")


@dataclasses.dataclass(frozen=True)
class Differentiated(Program):
    """A program whose step is that of `policy.value_and_grad`."""

    grads: GradientKind = "float32"

    @property
    def step(self) -> Any:
        return value_and_grad(self.loss, has_aux=True, grads=self.grads)


def figures(target: Target, program: Program, grads: GradientKind) -> Figures:
    made = Differentiated(program.loss, program.arguments, grads)
    return measure(target, made.step, arguments(target, made))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of models' names.
    """
    for target in chosen(on, ("v5e:2x2", "h100") if small else TARGETS, OTHERS):
        chips = len(target.devices)
        for case in small_cases(chips) if small else cases(chips):
            if only and not any(part in case.name for part in only):
                continue
            of = functools.partial(figures, target, case.programs("linen")["ours"])
            yield from rows_of(case.name, target, of("accumulator"), of("float32"))


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "float32"))
