"""The accuracy table: each layer and function in bfloat16 and float16, in ulps of its output,
beside its peers.

    python -m benchmarks.accuracy [--only REGEX] [--small] [--json FILE] [--markdown FILE]

**A figure** is the largest error over all elements of a result, in ulps of the dtype returned,
against float64; the exact result rounded once has 0.5. Inputs are rounded to what the layer is
given before the truth is computed, and so are the parameters of layers that multiply, since half
operands are their contract: only the computation is judged. The truth is Flax's layer, or JAX's or
Optax's function, in float64, with the variance in two passes; the tests hold it against NumPy's.

**An ulp** of a result y is the distance between neighbours of the dtype at max(|y|, f rms), where
rms is the root mean square of the row's exact results, and f is 1/64; 0 for functions that do not
subtract what is nearly equal; and 1 for matmul layers, whose intermediate results are rounded by
contract, and wherever the result is float32. A result wider than the row's dtype is rounded to it
first, so that nobody gains by returning something else (losses of ours return float32; so do
gradients of float32 parameters, and some of Flax's layers).

**Columns.** Ours run under the policy (params float32, compute half, output half). Flax's layers
get `dtype=`, the functions half inputs, torch runs under CPU autocast. "raises": it has no result
in that dtype. "float32 from bfloat16" is the policy mixed_bfloat16: bfloat16 inputs and matmuls,
float32 results; there Flax's norms get `dtype=float32`, JAX's and Optax's functions inputs widened
by hand, and whoever returns bfloat16 is off by up to 32768 ulps of float32 and more.

**What must hold**, or the command ends with status 1 and the names of the rows: ours within 1 ulp
of bfloat16 and float16 for norms, softmax, pooling, losses and sums, the gradients that are sums
included, and within 32 of float32 (4e-6: what float32 sums of thousands leave in one order or
another); and ours nowhere worse than the best of the others by more than 0.1 ulp, 10%, or what
rounding once leaves (in float32: twice, or 32 ulps). Where a contract of ours lets one of the
others be nearer, the report names it as accepted, says why, and holds the row against the rest.

**Attention.** Ours and torch's divide the product with the values by the softmax's sum and round
once; Flax's rounds the attention weights before that product. So do ours where weights are dropped
out or sown.

XLA may keep a float32 where a program rounds to half and reads that again, for ours and for
upstream alike. RoPE is measured where Flax has it (0.12.12 and later), WeightNorm and SpectralNorm
on the identity, so that what is measured is the weights.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Iterator

from benchmarks.accuracy import report
from benchmarks.accuracy.cases import PRECISIONS, Case, Precision, Row, measure
from benchmarks.accuracy.function_cases import function_cases
from benchmarks.accuracy.layer_cases import layer_cases


def selected(small: bool = False, only: str = "") -> Iterator[tuple[Case, Precision]]:
    """Each case with each precision that it is measured in; `only` is a regex searched for in its
    name.
    """
    for case in (*layer_cases(small), *function_cases(small)):
        for precision in PRECISIONS:
            if (case.wide or not precision.wide) and re.search(only, f"{case}, {precision}"):
                yield case, precision


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 where a row does not hold, 2 where `--only` matches nothing."""
    description, _, notes = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=description)
    parser.add_argument("--only", default="", help="a regex: the rows to measure")
    parser.add_argument("--small", action="store_true", help="the shapes of the test")
    parser.add_argument("--json", type=pathlib.Path, help="a file to write the figures to")
    parser.add_argument("--markdown", type=pathlib.Path, help="a file to write the table to")
    options = parser.parse_args(arguments)

    rows: list[Row] = [
        measure(case, precision) for case, precision in selected(options.small, options.only)
    ]
    if not rows:
        print(f"No row matches --only {options.only!r}.")
        return 2
    print(report.text(rows), report.about_torch(), report.summary(rows), sep="\n\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(rows), indent=1) + "\n")
    if options.markdown is not None:
        _, _, notes = notes.partition("\n\n")
        options.markdown.write_text(report.markdown(rows, notes))
    return 1 if any(report.complaints(row) for row in rows) else 0
