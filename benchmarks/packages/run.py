"""Measures one family's models in the environment that has their packages. `python -m
benchmarks.packages` calls it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.packages import imports, shims
from benchmarks.packages.families import FAMILIES, cases, modules
from benchmarks.packages.measure import SEEDS, measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a family's models and writes what was found after each, by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("file", type=Path, help="to write to, as JSON")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the models' names")
    parser.add_argument(
        "--swapped", action="store_true", help="float32 alone, with our modules for Flax's"
    )
    options = parser.parse_args(arguments)
    shims.install()
    replaced = imports.install(modules(options.family)) if options.swapped else set[str]()
    found: dict[str, Any] = {}
    for case in cases(options.family, options.only):
        print(case.name, file=sys.stderr, flush=True)
        measured = measure(case, SEEDS[:1], in_half=False) if options.swapped else measure(case)
        package = FAMILIES[options.family][case.name.partition(":")[0]]
        if options.swapped and not any(f"{name}.".startswith(f"{package}.") for name in replaced):
            measured.ways["float32"] = f"nothing in {package} imports linen or nnx of Flax"
        found[case.name] = dataclasses.asdict(measured)
        options.file.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
