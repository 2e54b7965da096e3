"""docs/benchmarks.md, made from the rows of a run: each table with ratios by name and quantity, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTES = {
    "models": """
Ours under mixed_bfloat16 against Flax with dtype=bfloat16 written into every layer, ratios ours / hand. Without biases
and normalisations the programs are the same. What differs in the other rows is what this library repairs:

- **saved**: half and less, as normalisations, softmax and pooling keep their half input and small statistics.
- **flops**, and **bytes** as lowered, count what backward computes again for that, before XLA fuses it into its
  neighbours. `c-bytes` is after: up to 8% more on CPU, where bfloat16 is emulated, and a float32 cotangent for the sum
  of a bias's gradient stands in memory beside the one that the matmul reads. Layer by layer (the next table) it is 3%
  at most.
- **tracing** is faster than by hand where there are normalisations or attention: what such a layer does is traced and
  differentiated once for all layers that are alike (`policy/remembering.py`); Flax's are traced one by one.
- **seconds** are CPU's, with their spread in the table that the command prints; the bound is 5% and the spread.
""",
    "scale": """
From 1 to 96 layers, 0.14 to 70 billion params and 1 to 64 devices, all of them shapes. What one more layer (param,
device) costs at the far end, against what it costs at the near end: 1 is a straight line. Rows that say "beside" hold
ours against the same by hand, or plain optax. Time to compile is XLA's, and bends by hand as well.
""",
    "peers": """
Ours against jmp's cast of a Flax model without dtypes, and against the model's Equinox twin under mpx. `bytes` as
lowered count what backward computes again, for what it does not save; `c-bytes` are after XLA fused that. An MLP moves
up to 18% more than its Equinox twin on CPU, although its program without biases is lowered to 1% fewer: XLA fuses the
two in other ways.
""",
    "inspection": """
`policy.audit` of a model, forward and backward, beside the trace that it needs; `policy.compare` of six layers beside a
float32 step: FLOPs, memory and CPU seconds, of ours under a policy and of Flax's under autocast.
""",
    "layers": """
`bytes` is as lowered, `c-bytes` compiled. The first three layers are not repaired: they are Flax's programs.
""",
    "autocast": """
The same models without a dtype in them, under `autocast`, against hand-threaded ones with a float32 softmax.
""",
    "ports": """
Models over Flax's own linen under `apply_policy`, alone and with their loss under `autocast`, against the same models
with dtype=bfloat16 in every layer: CPU seconds, and calls of Python functions, to trace value_and_grad.
""",
    "optimizer": """
Bytes an element that a compiled AdamW step moves, against the row's budget, plain optax, jmp and mpx; CPU nanoseconds
an element and CPU seconds to compile, against plain optax, which neither unscales nor looks for what is not finite.
""",
}


def markdown(environment: Mapping[str, str], tables: Mapping[str, Any]) -> str:
    """The page. Tables of rows of ratios are shown; others are named with their own pages."""
    where = ", ".join(f"{name} {value}" for name, value in environment.items() if name not in ("date", "device"))
    parts = [
        "# Benchmarks",
        "The tables of `python -m benchmarks --markdown FILE`, of which `--only NAME` makes one; with `--check` it "
        "fails where a bound is missed, and names the row.",
        f"{environment['date']}, on {environment['device']}, {where}.",
        "No GPU was at hand: `python -m benchmarks gpu` is what to run on one, in 8 minutes at most."
        if "gpu" not in tables
        else "",
        "What XLA counts is the same on every run; CPU seconds are not. Numerics have pages of their own: "
        "[accuracy.md](accuracy.md) and [convergence.md](convergence.md); so has "
        "[the exchange between devices](bf16_all_reduce.md).",
    ]
    for name, rows in tables.items():
        if isinstance(rows, list) and rows and all("ratio" in row for row in rows):
            parts += [f"## {name}", NOTES.get(name, "").strip(), _table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each name, one column for each quantity; a missed bound in bold, with the bound."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    names: dict[str, dict[str, str]] = {}
    for row in rows:
        names.setdefault(row["name"], {})[row["quantity"]] = _cell(row)
    lines = [["ours / reference", *quantities], ["---", *["---:"] * len(quantities)]]
    lines += [[name, *(cells.get(quantity, "") for quantity in quantities)] for name, cells in names.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio']:.3f}"
    return f"**{ratio}** (bound {row['bound']:g})" if row["missed"] else ratio
