"""Runs one train step once, in this process, and reads the memory that it took.

    python -m benchmarks.memory_job NAME             # prints the figures, as JSON
    python -m benchmarks.memory_job NAME --on here   # on the devices of JAX's default backend
    python -m benchmarks.memory_job NAME --small

On a CPU it is the growth of the process's peak resident memory, from /proc: after the step is
compiled and what is free is handed back to the system, until the step has run. Elsewhere it is the
growth of the device's ``peak_bytes_in_use``. Both have the arguments in them, which are made on the
device, each by a program of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.memory_steps import STEPS, Step

PROC = Path("/proc/self")


def estimated(step: Step, on: str, compiled: Any) -> dict[str, int]:
    """Returns the bytes that a step takes by the compiler's plan, in parts.

    Args:
      step: the step; nothing of it has run.
      on: the target.
      compiled: the step, compiled for the target.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"The compiler of {on!r} analyses no memory.")
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


def status_bytes(status: str, field: str) -> int:
    """Reads a field of the text of /proc/self/status, as in "VmHWM", in bytes.

    Raises:
      ValueError: the text has no such field.
    """
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {field}: this table needs Linux.")
    return 1024 * int(found[1])


def resident() -> int:
    """Returns the bytes of this process's resident memory, file pages and all."""
    found = re.search(r"^Rss:\s*(\d+) kB$", (PROC / "smaps_rollup").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else status_bytes((PROC / "status").read_text(), "VmRSS")


def peak_resident() -> int:
    """Returns the largest `resident` since `reset_peak`."""
    return status_bytes((PROC / "status").read_text(), "VmHWM")


def reset_peak() -> None:
    """Hands what is free back to the system, and lets the peak start at what is resident now.

    Raises:
      RuntimeError: the system has no such peak.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:  # the C library is glibc
        trim(0)
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError as error:
        raise RuntimeError(
            f"The peak of resident memory can't be reset: {error}. This table needs Linux."
        ) from None


def makers(shapes: Any) -> list[Callable[[], jax.Array]]:
    """Compiles a program for each leaf that makes it on the device, as nothing else.

    Floating-point numbers are 0.01 and integers 1, so that every page of the array is written.
    """
    made: dict[Any, Callable[[], jax.Array]] = {}

    def maker(leaf: Any) -> Callable[[], jax.Array]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return lambda: jax.random.key(0)
        value = 0.01 if jnp.issubdtype(leaf.dtype, jnp.floating) else 1
        kind = tuple(leaf.shape), leaf.dtype
        if kind not in made:
            made[kind] = jax.jit(lambda: jnp.full(leaf.shape, value, leaf.dtype)).lower().compile()
        return made[kind]

    return [maker(leaf) for leaf in jax.tree.leaves(shapes)]


def measured(step: Step, compiled: Any) -> int:
    """Makes the arguments, runs the step once, and returns the growth of the peak, in bytes.

    What is donated is held by nobody else, as in a training loop. The results are held until the
    peak is read.
    """
    device = jax.devices()[0]
    programs = makers(step.arguments)
    structure = jax.tree.structure(step.arguments)
    jax.block_until_ready(jax.random.key(0))  # its own program is compiled now
    if device.platform == "cpu":
        reset_peak()
        before, peak = resident(), peak_resident
    else:
        before, peak = device.memory_stats()["bytes_in_use"], lambda: _device_peak(device)
    arguments = list(jax.tree.unflatten(structure, [make() for make in programs]))
    jax.block_until_ready(arguments)
    results = compiled(*arguments)
    jax.block_until_ready(results)
    return peak() - before


def _device_peak(device: Any) -> int:
    return device.memory_stats()["peak_bytes_in_use"]


def figures(name: str, on: str, small: bool) -> dict[str, Any]:
    """Returns a step's estimate and what it took: bytes, and the device's name."""
    step = STEPS[name](small)
    compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()
    plan = estimated(step, on, compiled)
    return {
        "estimated": sum(plan.values()),
        "measured": measured(step, compiled),
        "plan": plan,
        "device": jax.devices()[0].device_kind,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures of one step, as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=STEPS, metavar="NAME", help="a step of memory_steps.py")
    parser.add_argument("--on", choices=("cpu", "here"), default="cpu")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.on == "cpu":
        jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(json.dumps(figures(options.name, options.on, options.small)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
