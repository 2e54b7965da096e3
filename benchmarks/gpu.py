"""What a policy costs on a GPU: tokens and images a second, memory, kernels, bandwidth, beside
dtypes threaded by hand.

    python -m benchmarks.gpu                 # at most 8 minutes; downloads nothing
    python -m benchmarks.gpu --json FILE     # writes the rows there, with device, date and versions
    python -m benchmarks.gpu --only decoder  # the jobs whose names hold that
    python -m benchmarks.gpu --tiny          # smallest sizes, to try the programs; so too where
                                             # there is no GPU

Everything is measured in one run, ours and the reference in turn (A B A B), as medians; `+-` is
half of the range of the ratios of neighbors. Of rates, a ratio above 1 is faster than the
reference. Matmuls of float32 run with TF32 on ("TF32", matmul precision "tensorfloat32") and off
("float32", "highest"). MiB is what XLA plans for a step: arguments, outputs and temporaries. Where
attention is, the note names its kernel, ours first, as read from the compiled programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_measures, gpu_models, table
from benchmarks.gpu_measures import Line, Sizes
from benchmarks.gpu_models import SETTINGS, Model
from benchmarks.markdown import version_of

LIMIT = 480.0
# Seconds to expect of a job of a kind before one has run; after that, as many as the longest took.
EXPECTED = {"optimizer": 20.0, "attention": 20.0, "model": 70.0}


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement; `kind` is what it takes as long as."""

    name: str
    kind: str
    run: Callable[[], Iterator[Line]]


def jobs(sizes: Sizes, models: dict[str, Model]) -> list[Job]:
    """Every job, those that tell most first: what the time doesn't reach is missing at the end."""

    def model(name: str, setting: str) -> Job:
        run = partial(gpu_measures.model, models[name], SETTINGS[setting], sizes)
        return Job(f"{name}, {setting}", "model", run)

    def step(name: str, beside: str | None = None) -> Job:
        return Job(
            f"AdamW, {name}", "optimizer", partial(gpu_measures.optimizer_step, name, sizes, beside)
        )

    def attention(setting: str) -> Job:
        run = partial(gpu_measures.attention, SETTINGS[setting], sizes)
        return Job(f"attention, {setting}", "attention", run)

    return [
        step("f32 / bf16, no skipping", beside="plain optax, f32 params, bf16 gradients"),
        attention("bf16"),
        model("decoder", "bf16"),
        model("ResNet-50", "bf16"),
        model("decoder", "f16"),
        model("decoder", "TF32"),
        model("ResNet-50", "f16"),
        model("ResNet-50", "TF32"),
        model("ViT-S", "bf16"),
        step("f32 / bf16", beside="jmp: unscale, select, f32 / bf16" if _has("jmp") else None),
        step("remainder, bf16 / bf16"),
        model("decoder", "float32"),
        attention("f16"),
        model("ResNet-50", "float32"),
        model("ViT-S", "f16"),
        model("ViT-S", "TF32"),
        model("ViT-S", "float32"),
        step("full masters, bf16 / bf16"),
    ]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Report:
    """What was measured, what failed and what there was no time for; printed as it comes."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts
        self.lines: list[Line] = []
        self.failed: dict[str, str] = {}
        self.missing: list[str] = []
        self.started = time.monotonic()

    def run(self, jobs: Sequence[Job], limit: float) -> None:
        """Runs jobs in order, but those that are expected to end after `limit` seconds."""
        longest: dict[str, float] = {}
        self.missing = [job.name for job in jobs]
        print(f"{table.header()}    +-")
        for job in jobs:
            start = time.monotonic()
            if start - self.started + longest.get(job.kind, EXPECTED[job.kind]) > limit:
                continue
            try:
                for line in job.run():
                    self.lines.append(line)
                    print(shown(line), flush=True)
            except Exception as error:  # an unknown device may reject anything: say so, and go on
                self.failed[job.name] = (
                    f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                )
                print(f"{job.name} failed: {self.failed[job.name]}", flush=True)
            self.missing.remove(job.name)
            longest[job.kind] = max(longest.get(job.kind, 0.0), time.monotonic() - start)

    def finish(self, file: str | None) -> None:
        """Says what is missing, and writes the file."""
        if self.missing:
            print(f"No time was left for: {'; '.join(self.missing)}. --only NAME measures them.")
        seconds = time.monotonic() - self.started
        print(f"{len(self.lines)} rows in {seconds:.0f} s", flush=True)
        if file:
            rows = [line.as_json() for line in self.lines]
            found = {
                **self.facts,
                "seconds": seconds,
                "failed": self.failed,
                "missing": self.missing,
                "rows": rows,
            }
            Path(file).write_text(json.dumps(found, indent=1))


def shown(line: Line) -> str:
    """Returns a row of the table, with its spread."""
    spread = "" if line.spread is None else f"{line.spread:.1%}"
    numbers = table.line(dataclasses.replace(line, note=""))
    return f"{numbers:95}{spread:>6}{f'  ({line.note})' if line.note else ''}".rstrip()


# --------------------------------------------------------------------------------------------------
# What the run is of
# --------------------------------------------------------------------------------------------------


def facts(device: Any) -> dict[str, Any]:
    """Device, date and versions."""
    names = ("jax", "jaxlib", "flax", "optax", "jmp")
    versions = {name: version_of(name) for name in names}
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "backend": device.client.platform_version,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 where a job failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, as on a CPU")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--only", metavar="NAME", help="the jobs whose names hold this")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT, help="how long it may take: %(default)g"
    )
    options = parser.parse_args(arguments)
    # One device, so that attention may take a fused kernel; and memory as it is needed.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.devices()[0]
    report = Report(facts(device))
    has_gpu = device.platform == "gpu"
    print(f"{device.device_kind}, {report.facts['date']}, {report.facts['versions']}")
    if not has_gpu:
        print("There is no GPU here: tiny sizes, to try the programs; their figures say nothing.")
    tiny = options.tiny or not has_gpu
    memory = (device.memory_stats() or {}).get("bytes_limit", 16e9)
    sizes, models = Sizes.of(memory, tiny=tiny), gpu_models.models(memory, tiny=tiny)

    def give_up() -> None:  # a compilation that takes too long can't be broken off otherwise
        print("Out of time.")
        report.finish(options.json)
        os._exit(1)

    watch = threading.Timer(options.seconds, give_up)
    watch.daemon = True
    watch.start()
    chosen = [job for job in jobs(sizes, models) if not options.only or options.only in job.name]
    report.run(chosen, options.seconds - 10 if has_gpu else options.seconds)
    watch.cancel()
    report.facts["peak_bytes_in_use"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    report.finish(options.json)
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
