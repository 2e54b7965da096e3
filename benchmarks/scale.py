"""How tracing, compiling and memory grow with layers, params and devices. Straight lines are
wanted.

    python -m benchmarks.scale  # the table: 15 minutes of one core; nothing is allocated or run
    python -m benchmarks.scale --check  # exits with 1 where a line bends, or a row misses its bound
    python -m benchmarks.scale --small  # equations, lines and bytes only: 15 s
    python -m benchmarks.scale --json FILE

Two kinds of rows. Those that say "beside" hold ours against the same model threaded by hand, or
plain optax. All others hold what one more layer (param, device) costs at the far end, in the column
`ours`, against what it costs at the near end: 1 is a straight line.

equations  of the traced value_and_grad, those in bodies included.
lines      of the StableHLO that it lowers to.
saved      bytes that `jax.vjp` keeps for the backward pass beside the function's inputs.
calls      of Python functions while it is traced, as cProfile counts them: the time to trace,
           without its noise.
tracing    CPU seconds of this process for `jax.jit(...).trace`, garbage collection off, the best of
           two; no bound: on a machine that does other things they are known to a third;
lowering   for `.lower()`;
compiling  for `.compile()`, of all of XLA's threads.
temporary  bytes of temporary memory that the compiled program plans; `moved` is the bytes that it
           accesses.
state      bytes of params and optimizer state, from `jax.eval_shape`.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import scale_devices, scale_params
from benchmarks.autocast import saved_bytes
from benchmarks.scale_lines import equations, straight
from benchmarks.scale_models import GROUPS, PROGRAMS, Program
from benchmarks.table import Row, run

LAYERS, FEW_LAYERS = (2, 6, 12, 24, 48, 96), (1, 2, 4)
COMPILED_LAYERS, PROFILED_LAYERS = (2, 6, 12, 24, 48), (2, 6, 12)
EXACT, MEMORY = 1.01, 1.05
# autocast rewrites equal layers once: from one layer to two, part of the second is shared.
SHARED = 1.06
# A module looks at every rule before its own: with a rule a layer, a small part of the calls is
# quadratic.
RULES = 1.05
COUNTED, SECONDS = ("equations", "lines", "saved"), ("tracing", "lowering")


@dataclasses.dataclass(frozen=True)
class Size:
    """What a program of some depth costs before it is compiled; the quantities of the table."""

    equations: float
    lines: float
    saved: float
    tracing: float
    lowering: float


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, all threads, for a call; and what it returned. No garbage is
    collected meanwhile.
    """
    gc.disable()
    try:
        start = time.process_time()
        result = call()
        return time.process_time() - start, result
    finally:
        gc.enable()


def lowered(program: Program) -> tuple[float, Any, float, Any]:
    """Seconds to trace the value_and_grad, it traced, seconds to lower that, and it lowered."""
    function = jax.jit(jax.value_and_grad(program.loss))
    tracing, traced = seconds(lambda: function.trace(*program.arguments))
    lowering, low = seconds(traced.lower)
    return tracing, traced, lowering, low


def sizes(names: Sequence[str], layers: int, times: int) -> dict[str, Size]:
    """Traces and lowers programs of some depth; compiles nothing. Seconds are the best of `times`,
    taken in turn.
    """
    runs: dict[str, list[tuple[float, Any, float, Any]]] = {name: [] for name in names}
    for _ in range(times):
        gc.collect()
        for name in names:
            runs[name].append(lowered(PROGRAMS[name](layers)))
    return {name: _size(PROGRAMS[name](layers), runs[name]) for name in names}


def _size(program: Program, runs: Sequence[tuple[float, Any, float, Any]]) -> Size:
    saved = saved_bytes(
        lambda params, *others: (program.loss(params, *others), None), program.arguments
    )
    _, traced, _, low = runs[-1]
    return Size(
        equations=equations(traced.jaxpr.jaxpr),
        lines=low.as_text().count("\n"),
        saved=saved,
        tracing=min(found[0] for found in runs),
        lowering=min(found[2] for found in runs),
    )


def layer_rows(
    reference: str,
    names: Sequence[str],
    depths: Sequence[int],
    quantities: Sequence[str],
    times: int,
) -> Iterator[Row]:
    """Programs beside what they are held against at the far end, and how straight each grows."""
    everything = (reference, *names)
    if times > 1:
        sizes(everything, 1, 1)  # fills JAX's own caches
    at = [sizes(everything, layers, times) for layers in depths]
    for quantity in quantities:
        lines = {name: [getattr(size[name], quantity) for size in at] for name in everything}
        for name in names:
            yield Row(
                quantity,
                f"{name} beside {reference}, {depths[-1]} layers",
                lines[name][-1],
                lines[reference][-1],
            )
        for name in everything:
            is_bound = quantity in COUNTED and name != reference
            bound = SHARED if name == "autocast" and depths[0] == 1 else EXACT
            yield straight(quantity, name, depths, lines[name], bound if is_bound else None)


def calls(program: Program) -> int:
    """How many calls of Python functions it takes to trace the value_and_grad."""
    profile = cProfile.Profile()
    profile.runcall(jax.jit(jax.value_and_grad(program.loss)).trace, *program.arguments)
    return sum(entry.callcount for entry in profile.getstats())  # pyright: ignore[reportAttributeAccessIssue]


def call_rows(reference: str, names: Sequence[str], depths: Sequence[int]) -> Iterator[Row]:
    """Calls to trace, beside what programs are held against, and how straight they grow."""
    lines: dict[str, list[int]] = {}
    for name in (reference, *names):
        found = [
            calls(PROGRAMS[name](layers)) for layers in (1, *depths)
        ]  # the first fills JAX's own caches
        lines[name] = found[1:]
    for name in names:
        yield Row(
            "calls",
            f"{name} beside {reference}, {depths[-1]} layers",
            lines[name][-1],
            lines[reference][-1],
        )
    for name, line in lines.items():
        bound = RULES if "a path rule a layer" in name else EXACT
        yield straight("calls", name, depths, line, None if name == reference else bound)


def compiled_rows(depths: Sequence[int]) -> Iterator[Row]:
    """What XLA makes of the linen decoder: seconds, temporary memory, bytes accessed."""
    names = "linen", "linen by hand"
    lines: dict[tuple[str, str], list[float]] = {}
    for name in names:
        for layers in (1, *depths):  # the first loads what a process needs once
            low = lowered(PROGRAMS[name](layers))[3]
            compiling, compiled = seconds(low.compile)
            figures = {
                "compiling": compiling,
                "temporary": compiled.memory_analysis().temp_size_in_bytes,
                "moved": compiled.cost_analysis()["bytes accessed"],
            }
            for quantity, figure in figures.items() if layers > 1 else ():
                lines.setdefault((quantity, name), []).append(figure)
    for quantity in ("temporary", "moved", "compiling"):
        ours, hand = (lines[quantity, name] for name in names)
        yield Row(quantity, f"linen beside linen by hand, {depths[-1]} layers", ours[-1], hand[-1])
        yield straight(quantity, "linen", depths, ours, None if quantity == "compiling" else MEMORY)
        yield straight(quantity, "linen by hand", depths, hand, None)


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured. `small` counts, and compiles or times nothing."""
    if small:
        few = {
            "linen by hand": ("linen", "autocast"),
            "nnx by hand": ("nnx",),
            "scanned by hand": ("scanned",),
        }
        for reference, names in few.items():
            yield from layer_rows(reference, names, FEW_LAYERS, COUNTED, 1)
    else:
        for reference, names in GROUPS.items():
            yield from layer_rows(reference, names, LAYERS, (*COUNTED, *SECONDS), 2)
            if "scanned" not in names:  # traced once for all layers: there is no line
                yield from call_rows(reference, names, PROFILED_LAYERS)
        yield from compiled_rows(COMPILED_LAYERS)
    yield from scale_params.rows(small)
    yield from scale_devices.rows(small)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(__doc__, rows, "near, hand", arguments)


if __name__ == "__main__":
    sys.exit(main())
