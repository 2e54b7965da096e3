"""What it costs to look at a program before it runs.

    python -m benchmarks.inspection           # the table: 40 seconds
    python -m benchmarks.inspection --check   # exits with 1 where a ratio misses its bound
    python -m benchmarks.inspection --json    # the rows as JSON

audit      seconds for `policy.audit` of a model, forward and backward, beside those for `jax.make_jaxpr` of the same
           `value_and_grad`: tracing included. Caches warm, a new function each time, the median of pairs.
           The models are those of `benchmarks/autocast_models.py`; nothing is compiled, nothing runs.

Rows of `policy.compare` come from `benchmarks/inspection_compare.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.autocast import Case, decoder, resnet
from policy import audit

AUDIT = 2.0  # times the trace
TIMES = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a quantity of ours, what it stands beside, and the largest ratio that is allowed."""

    quantity: str
    name: str
    ours: float
    beside: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.ours / self.beside if self.beside else float("nan")

    @property
    def is_missed(self) -> bool:
        return not self.ratio <= self.bound


def _step(case: Case, program: str) -> Callable[..., Any]:
    """The loss and its gradients, as a function that JAX has not seen before."""
    loss = case.loss({"float32": None, "bfloat16": jax.numpy.bfloat16}[program])
    return lambda *arguments: jax.value_and_grad(loss, has_aux=True)(*arguments)


def _seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    finally:
        gc.enable()


def auditing(case: Case, program: str, times: int = TIMES) -> Row:
    """An audit beside the trace that it needs: of a model in float32, or with bfloat16 threaded by hand."""
    arguments = case.arguments()
    pairs = []
    for _ in range(times + 1):
        traced = _seconds(lambda: jax.make_jaxpr(_step(case, program))(*arguments))
        audited = _seconds(lambda: audit(_step(case, program), *arguments))
        pairs.append((audited, traced))
    pairs = sorted(pairs[1:], key=lambda pair: pair[0] / pair[1])  # the first has cold caches
    ours, beside = pairs[len(pairs) // 2]
    return Row("audit", f"{case.name}, {program}, beside its trace", ours, beside, AUDIT)


def rows(times: int = TIMES) -> Iterator[Row]:
    """Every row, as it is measured."""
    for case in (decoder(12, dropout=0.1), resnet()):
        for program in ("float32", "bfloat16"):
            yield auditing(case, program, times)
    if importlib.util.find_spec("benchmarks.inspection_compare") is not None:
        yield from importlib.import_module("benchmarks.inspection_compare").rows()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a ratio misses its bound")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--times", type=int, default=TIMES, help="how often each is measured")
    options = parser.parse_args(argv)
    measured = []
    for row in rows(options.times):
        measured.append(row)
        if not options.json:
            if len(measured) == 1:
                print(f"{'':9}{'':55}{'ours':>11}{'beside':>11}{'ratio':>8}{'bound':>7}")
            numbers = f"{row.ours:11.4g}{row.beside:11.4g}{row.ratio:8.3f}{row.bound:7g}"
            print(f"{row.quantity:9}{row.name:55}{numbers}{'  missed' if row.is_missed else ''}", flush=True)
    if options.json:
        print(json.dumps([{**dataclasses.asdict(row), "ratio": row.ratio} for row in measured], indent=1))
    return int(options.check and any(row.is_missed for row in measured))


if __name__ == "__main__":
    sys.exit(main())
