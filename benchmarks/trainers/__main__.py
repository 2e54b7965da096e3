"""Models of trainers' repositories, ported by hand: their dtypes deleted, a policy set.

    git clone https://github.com/google-research/big_vision sources/big_vision
    python -m benchmarks.trainers --sources sources          # every trainer
    python -m benchmarks.trainers --sources sources --only big_vision
    python -m benchmarks.trainers --sources sources --only SigLIP --on  # compiles nothing
    python -m benchmarks.trainers --sources sources --write  # stores results, writes the pages
    python -m benchmarks.trainers --stored --write           # the pages, from the stored results

The sources are checked by sha256, copied, and edited by the scripts in benchmarks/trainers/edits.
Both versions run in processes of their own. Of each model:

identical        whether the port without a policy has upstream's parameter tree, and the same bits
                 of parameters, outputs and gradients.
outputs,         relative L2 error beside float32, of the median of 16 draws: of the port under
gradients        mixed_bfloat16, of upstream's own dtype option, and of upstream under autocast.
float32 FLOPs    share of the FLOPs of matmuls, forward and backward, with a float32 operand.
findings         of `policy.audit`, forward and backward.
cycles, memory   of layers at their real width, forward and backward, compiled and not run. A GPU's
                 compiler gives no cycles: `time` is then the roofline of its published figures.

--check exits with 1 where a port is not identical, leaves more than 1% of the FLOPs in float32, or
has an error above 1.1 times the one beside it.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.packages import environment
from benchmarks.packages.measure import Figures, relative_error
from benchmarks.packages.rows import IDENTICAL
from benchmarks.trainers import tables
from benchmarks.trainers.run import trainer_of
from benchmarks.trainers.sources import Trainer, fetch, port

TARGETS = ("v5e:1x1", "h100")
_NO_TRAINERS = ("__init__", "__main__", "model", "run", "sources", "tables")
Found = dict[str, Any]


def names() -> list[str]:
    """Returns the trainers' names: one file each."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if file.stem not in _NO_TRAINERS)


def measured(trainer: Trainer, options: argparse.Namespace, only: Sequence[str]) -> Found:
    """Measures both versions of a trainer's models. Returns what was found by model."""
    with tempfile.TemporaryDirectory() as folder:
        upstream = fetch(trainer, options.sources, Path(folder) / "upstream")
        lines = port(trainer, upstream, Path(folder) / "port")
        theirs = _run(trainer, upstream, options.on, only)
        ours = _run(trainer, Path(folder) / "port", options.on, only, "--port")
    records = {name: compared(theirs[name], ours[name]) for name in theirs}
    counts = {"removed": lines.removed, "added": lines.added}
    return {n: {"revision": trainer.revision} | counts | r for n, r in records.items()}


def _run(
    trainer: Trainer, sources: Path, targets: Sequence[str], only: Sequence[str], *flags: str
) -> Found:
    file = sources.with_suffix(".pickle")
    module = ["benchmarks.trainers.run", trainer.name, str(sources), str(file), *flags]
    status = environment.run(Path(sys.executable), [*module, "--only", *only, "--on", *targets])
    if status:
        raise subprocess.CalledProcessError(status, module)
    found: Found = pickle.loads(file.read_bytes())
    return found


def compared(theirs: Found, ours: Found) -> Found:
    """Returns the record of a model from what was found of both versions."""
    exact, ways = theirs["ways"]["float32"], {}
    for way, found in (*theirs["ways"].items(), *ours["ways"].items()):
        if isinstance(found, str) or isinstance(exact, str):
            ways[way] = found if isinstance(found, str) else "no float32 to compare with"
        elif way != "float32":
            pairs = (map(relative_error, found[i], exact[i]) for i in (0, 1))
            ways[way] = vars(Figures(found[2], *map(statistics.median, pairs)))
    programs = {
        target: theirs["programs"].get(target, {}) | ours["programs"].get(target, {})
        for target in ours["programs"]
    }
    return {
        "identical": difference(theirs, ours),
        "ways": ways,
        "findings": theirs["findings"] | ours["findings"],
        "programs": programs,
    }


def difference(theirs: Found, ours: Found) -> str:
    """Returns what differs between both versions in float32, or `IDENTICAL`."""
    for found in (theirs, ours):
        if isinstance(found["ways"]["float32"], str):
            return found["ways"]["float32"]
    if theirs["tree"] != ours["tree"]:
        return "another tree of parameters"
    pairs = zip(theirs["digests"], ours["digests"], strict=True)
    differing = [i for i, (one, other) in enumerate(pairs) if one != other]
    return f"differs in arrays {differing}" if differing else IDENTICAL


def _chosen(only: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields trainers, each with the parts of models' names that choose among its models."""
    for name in names():
        of_name = [part for part in only if part.partition(":")[0] in (part, name)]
        parts = [part for part in of_name if part not in names()]
        if not only or name in only:
            yield name, ()
        elif parts:
            yield name, parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 1 where a bound is missed under ``--check``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sources", type=Path, metavar="FOLDER", help="checkouts, each by its trainer's name")
    add("--only", nargs="+", default=[], metavar="NAME", help="trainers, or parts of models' names")
    add("--on", nargs="*", default=TARGETS, metavar="TARGET", help="to compile for; none: nothing")
    add("--stored", action="store_true", help="measure nothing: take the stored results")
    add("--write", action="store_true", help="store the results and write the pages")
    add("--check", action="store_true", help="exit with 1 where a bound is missed")
    options = parser.parse_args(arguments)
    missed = []
    for name, only in _chosen(options.only):
        stored = tables.load(name)
        new = {} if options.stored else measured(trainer_of(name), options, only)
        for model, record in new.items():  # what was not measured now is as it was
            before = stored.get(model, {})
            programs = before.get("programs", {}) | record.get("programs", {})
            new[model] = before | record | {"programs": programs}
        found = stored | new
        print(f"\n== {name}\n\n{tables.page_table(found)}", flush=True)
        missed += [text for model in found for text in tables.missed(model, found[model])]
        if options.write:
            tables.write(name, found)
    if options.write:
        tables.write_overview(names())
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed and options.check))


if __name__ == "__main__":
    sys.exit(main())
