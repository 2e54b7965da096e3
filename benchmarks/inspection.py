"""What it costs to look at a program before it runs.

    python -m benchmarks.inspection          # the table, that of benchmarks.inspection_compare
                                             # included: 3 minutes
    python -m benchmarks.inspection --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.inspection --small  # shallower models
    python -m benchmarks.inspection --json FILE

audit      CPU seconds for `policy.audit` of a model, forward and backward, beside those for
           `jax.make_jaxpr` of the same `value_and_grad`: tracing included. Caches warm, a new
           function each time, the median of pairs. The models are those of
           `benchmarks/autocast_models.py`; nothing is compiled, nothing runs.

Rows of `policy.compare` come from `benchmarks/inspection_compare.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import inspection_compare
from benchmarks.autocast import Case, decoder, resnet
from benchmarks.models import cpu_seconds
from benchmarks.table import Row, run
from policy import audit

AUDIT = 2.0  # times the trace
TIMES = 5


def _step(case: Case, program: str) -> Callable[..., Any]:
    """The loss and its gradients, as a function that JAX has not seen before."""
    loss = case.loss({"float32": None, "bfloat16": jax.numpy.bfloat16}[program])
    return lambda *arguments: jax.value_and_grad(loss, has_aux=True)(*arguments)


def auditing(case: Case, program: str, times: int = TIMES) -> Row:
    """An audit beside the trace that it needs: of a model in float32, or with bfloat16 threaded by
    hand.
    """
    arguments = case.arguments()
    pairs = []
    for _ in range(times + 1):
        traced = cpu_seconds(lambda: jax.make_jaxpr(_step(case, program))(*arguments))
        audited = cpu_seconds(lambda: audit(_step(case, program), *arguments))
        pairs.append((audited, traced))
    pairs = sorted(pairs[1:], key=lambda pair: pair[0] / pair[1])  # the first has cold caches
    ours, beside = pairs[len(pairs) // 2]
    return Row("audit", f"{case.name}, {program}, beside its trace", ours, beside, AUDIT)


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured; `small` has shallower models."""
    for case in (decoder(2),) if small else (decoder(12, dropout=0.1), resnet()):
        for program in ("float32", "bfloat16"):
            yield auditing(case, program)
    yield from inspection_compare.rows(small)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "beside"))
