"""Measures one family's models in the environment that has their packages. `python -m benchmarks.packages` calls it."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages import imports, shims
from benchmarks.packages.cases import Case
from benchmarks.packages.families import FAMILIES, cases, modules
from benchmarks.packages.measure import draws, measure, results, told

Found = dict[str, Any]


def figures(case: Case) -> Found:
    """Returns what was measured of each way to run a model."""
    found = dict(measure(case))
    return {way: each if isinstance(each, str) else dataclasses.asdict(each) for way, each in found.items()}


def digests(case: Case) -> Found:
    """Returns a digest of each parameter, output and gradient of a model in float32; or its error."""
    try:
        drawn = draws(case, range(1))
        outputs, gradients, _ = results(case, "float32", drawn)
    except Exception as error:
        return {"error": told(error)}
    named = {"params": drawn[0].params, "rest": drawn[0].rest, "outputs": outputs, "gradients": gradients}
    return {f"{kind}{i}": digest for kind, tree in named.items() for i, digest in enumerate(_digests(tree))}


def _digests(tree: Any) -> Iterator[str]:
    for leaf in jax.tree.leaves(tree):
        array = jax.device_get(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        yield f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a family's models and writes what was found after each, by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("file", type=Path, help="to write to, as JSON")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the models' names")
    parser.add_argument("--digests", action="store_true", help="digests of float32's results, instead of figures")
    parser.add_argument("--swapped", action="store_true", help="let the packages import our modules for Flax's")
    options = parser.parse_args(arguments)
    shims.install()
    if options.swapped:
        imports.install(modules(options.family))
    look: Callable[[Case], Found] = digests if options.digests else figures
    found: dict[str, Found] = {}
    for case in cases(options.family, options.only):
        print(case.name, file=sys.stderr, flush=True)
        found[case.name] = look(case)
        options.file.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
