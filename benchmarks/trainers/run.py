"""Measures one version of a trainer's models, in a process of its own: the sources on its path.
`python -m benchmarks.trainers` calls it.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import jax

import policy
from benchmarks.accel.program import measure, placed
from benchmarks.packages.cases import AUTOCAST, OWN, PORT, Way
from benchmarks.packages.measure import SEEDS, digests, draws, results, told
from benchmarks.packages.stubs import stubbed
from benchmarks.trainers.model import Model, Ported, large_step
from benchmarks.trainers.sources import Trainer
from policy.inspect.estimate.targets import Target

DRAWS = SEEDS[:16]


def trainer_of(name: str) -> Trainer:
    """Returns a trainer by the name of its file."""
    return importlib.import_module(f"benchmarks.trainers.{name}").TRAINER


def ways_of(model: Model, is_port: bool) -> tuple[Way, ...]:
    """The ways to run one version in bfloat16."""
    return (PORT,) if is_port else (*((OWN,) if model.has_option else ()), AUTOCAST)


def errors(model: Model, is_port: bool) -> dict[str, Any]:
    """Returns outputs and gradients of all draws by way, and what is compared of float32."""
    case: Any = Ported(model)
    drawn = draws(case, DRAWS)
    first = (drawn[0].params, drawn[0].rest)
    found: dict[str, Any] = {"ways": {}, "findings": {}}
    for way in ("float32", *ways_of(model, is_port)):
        try:
            found["ways"][way] = results(case, way, drawn)
            if way != "float32":
                found["findings"][way] = findings(model, way)
        except Exception as error:
            found["ways"][way] = told(error)
    exact = found["ways"]["float32"]
    found["tree"] = str(jax.tree.structure(first))
    found["digests"] = list(digests((first, exact if isinstance(exact, str) else exact[:2])))
    return found


def findings(model: Model, way: Way) -> dict[str, int]:
    """Counts audit's findings on the loss of the small model and its gradients, by kind."""
    step, shapes = large_step(model, model, way)
    found = policy.audit(step, *shapes).findings
    return dict(collections.Counter(finding.kind for finding in found))


def programs(model: Model, targets: list[str], is_port: bool) -> dict[str, Any]:
    """Compiles the large model for each target: the port; upstream with its own option, or under
    autocast where it has none. What the compiler rejects is left out.
    """
    found: dict[str, Any] = {}
    if model.large is None:
        return found
    for name in targets:
        target = Target(name)
        for way in ways_of(model, is_port)[:1]:
            print(f"  {name}, {way}", file=sys.stderr, flush=True)
            step, shapes = large_step(model, model.large, way)
            try:
                figures = measure(target, step, [placed(target, shape) for shape in shapes])
            except jax.errors.JaxRuntimeError as error:  # XLA for GPUs without its autotuner
                print(f"  {told(error)}", file=sys.stderr, flush=True)
                continue
            found.setdefault(name, {})[way] = {
                "cycles": figures.cycles,
                "seconds": figures.compute_seconds,
                "bytes": figures.bytes,
                "memory": figures.memory,
                "temporary": figures.temporary,
            }
    return found


def main() -> None:
    """Measures the models of a trainer and pickles what was found, by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer")
    parser.add_argument("sources", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--on", nargs="*", default=[])
    options = parser.parse_args()
    trainer = trainer_of(options.trainer)
    sys.path[:0] = [str(options.sources / trainer.root), str(options.sources)]
    found = {}
    with stubbed(*trainer.stubs):
        for model in trainer.models():
            if options.only and not any(part in model.name for part in options.only):
                continue
            print(model.name, "port" if options.port else "upstream", file=sys.stderr, flush=True)
            found[model.name] = errors(model, options.port) | {
                "programs": programs(model, options.on, options.port)
            }
    options.file.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
