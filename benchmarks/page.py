"""docs/benchmarks.md, made from the rows of runs: each table with ratios by name and quantity, and
what it says.

python -m benchmarks accel --json accel.json                    # what TPUs and GPUs get
python -m benchmarks --json cpu.json                            # and XLA's programs for CPUs
python -m benchmarks.page accel.json cpu.json > docs/benchmarks.md
python -m benchmarks.page accel.json --into docs/benchmarks.md  # the accelerators' part alone
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTES = {
    "models": """
Ours under mixed_bfloat16 against Flax with dtype=bfloat16 written into every layer, ratios ours / hand. Without biases
and normalisations the programs are the same. What differs in the other rows is what this library repairs:

- **saved**: half and less, as normalisations, softmax and pooling keep their half input and small statistics.
- **flops**, and **bytes** as lowered, count what backward computes again for that, before XLA fuses it into its
  neighbours. `c-bytes` is after: up to 8% more on CPU, where bfloat16 is emulated, and a float32 cotangent for the sum
  of a bias's gradient stands in memory beside the one that the matmul reads. Layer by layer (the next table) it is
  more for LayerNorm, GroupNorm and BatchNorm: XLA for CPUs writes the squares that they sum, which accelerators fuse.
- **tracing** is faster than by hand where there are normalisations or attention: what such a layer does is traced and
  differentiated once for all layers that are alike (`policy/checkpointing.py`); Flax's are traced one by one.
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


ACCELERATORS = """
Programs as the compilers of TPUs and GPUs make them, on a machine that has neither: nothing was timed. Each cell is the
ratio ours / by hand and, in brackets, the two figures, of one chip. **cycles** are the compiler's estimate, a loop's
body as often as it runs, of a `cond` the costlier branch, and kernels without an estimate at the roofline of the chip's
published peaks; **seconds** are these and what the collectives take at the published bandwidth of the links; **bytes**
are moved to and from memory, **temporary** is memory at its peak beside arguments and results, **exchange** is what
collectives leave on a chip. **/autocast** holds ours against autocast of the model without a dtype. The compilers of
GPUs estimate no cycles.
"""
ACCELERATOR_NOTES = {
    "models": """
value_and_grad of the loss, ours under mixed_bfloat16, by hand Flax with dtype=bfloat16; on TPUs the batch is sharded
over four chips. The columns **autocast** and **float32** hold those against by hand.
""",
    "layers": "value_and_grad of the mean square of one layer's result, on one chip.",
}
OPENING, CLOSING = "<!-- accelerators -->", "<!-- end of accelerators -->"


def markdown(environment: Mapping[str, str], tables: Mapping[str, Any]) -> str:
    """The page. Tables of rows of ratios are shown, the accelerators' first; others are named with
    their own pages.
    """
    parts = [
        "# Benchmarks",
        "The tables of `python -m benchmarks --markdown FILE`, of which `--only NAME` makes one; "
        "with `--check` it "
        "fails where a bound is missed, and names the row.",
        "No GPU was at hand: `python -m benchmarks gpu` is what to run on one, in 8 minutes at "
        "most."
        if "gpu" not in tables
        else "",
        accelerators(environment, tables["accel"]) if tables.get("accel") else "",
        f"# XLA for CPUs\n\n{_where(environment)}" if set(tables) - {"accel"} else "",
        "What XLA counts is the same on every run; CPU seconds are not. Numerics have pages of "
        "their own: "
        "[accuracy.md](accuracy.md) and [convergence.md](convergence.md); so has "
        "[the exchange between devices](bf16_all_reduce.md).",
    ]
    for name, rows in tables.items():
        if (
            name != "accel"
            and isinstance(rows, list)
            and rows
            and all("ratio" in row for row in rows)
        ):
            parts += [f"## {name}", NOTES.get(name, "").strip(), _table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def accelerators(environment: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The part of the page on TPUs and GPUs: a table for each chip and each of the command's
    tables.
    """
    versions = {
        name: version for name, version in environment.items() if version != "not installed"
    }
    parts = [OPENING, "# TPUs and GPUs", _where(versions), ACCELERATORS.strip()]
    tables = dict.fromkeys(row["table"] for row in rows if row["table"] != "baseline")
    for name in tables:
        of_table = [row for row in rows if row["table"] == name]
        parts += [f"## {name} on accelerators", ACCELERATOR_NOTES.get(name, "").strip()]
        for target in dict.fromkeys(row["target"] for row in of_table):
            of_target = [row for row in of_table if row["target"] == target]
            parts += [
                f"### {target}" if target else "",
                _table(of_target, "ours / by hand", _with_figures),
            ]
    return "\n\n".join(part for part in [*parts, CLOSING] if part)


def into(page: str, part: str) -> str:
    """A page with its part on accelerators replaced; one that has none gets it after its first
    paragraph.

    Raises:
      ValueError: the page's part has no end.
    """
    if OPENING in page:
        before, _, rest = page.partition(OPENING)
        if CLOSING not in rest:
            raise ValueError(f"The page has {OPENING}, and no {CLOSING} after it.")
        return before + part + rest.partition(CLOSING)[2]
    title, first, rest = page.split("\n\n", 2)
    return "\n\n".join((title, first, part, rest))


def _where(environment: Mapping[str, str]) -> str:
    where = ", ".join(
        f"{name} {value}" for name, value in environment.items() if name not in ("date", "device")
    )
    return f"{environment['date']}, on {environment['device']}, {where}."


def _table(
    rows: Sequence[Mapping[str, Any]],
    corner: str = "ours / reference",
    cell: Callable[[Mapping[str, Any]], str] | None = None,
) -> str:
    """A line for each name, a column for each quantity; a missed bound in bold, with the bound."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    names: dict[str, dict[str, str]] = {}
    for row in rows:
        names.setdefault(row["name"], {})[row["quantity"]] = (cell or _cell)(row)
    lines = [[corner, *quantities], ["---", *["---:"] * len(quantities)]]
    lines += [
        [name, *(cells.get(quantity, "") for quantity in quantities)]
        for name, cells in names.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio']:.3f}"
    bound = "" if row["bound"] is None else f" (bound {row['bound']:g})"
    return f"**{ratio}**{bound}" if row["missed"] else ratio


def _with_figures(row: Mapping[str, Any]) -> str:
    """The ratio, and the figures that it is of."""
    unknown = f", not counted: {row['unknown']}" if row["unknown"] else ""
    return f"{_cell(row)} ({_short(row['ours'])} / {_short(row['reference'])}{unknown})"


def _short(number: float) -> str:
    """Three digits and a unit: 12.3M."""
    for unit, size in (
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
        ("", 1.0),
        ("m", 1e-3),
        ("u", 1e-6),
    ):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page of what runs wrote with ``--json``, or replaces the accelerators' part of a
    page.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="written by python -m benchmarks --json"
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="replace the accelerators' part of this page"
    )
    options = parser.parse_args(arguments)
    runs = [json.loads(file.read_text()) for file in options.files]
    of_accel = [run for run in runs if run["tables"].get("accel")]
    if options.into and not of_accel:
        print(
            "There are no accelerators' rows: python -m benchmarks accel --json FILE writes them.",
            file=sys.stderr,
        )
        return 2
    if options.into:
        part = accelerators(of_accel[-1]["environment"], of_accel[-1]["tables"]["accel"])
        options.into.write_text(into(options.into.read_text(), part))
        return 0
    tables = {name: rows for run in runs for name, rows in run["tables"].items()}
    print(markdown(runs[-1]["environment"], tables), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
