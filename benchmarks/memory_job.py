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
import functools
import gc
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import policy
from benchmarks.memory_steps import STEPS, Step

PROC = Path("/proc/self")
Maker = Callable[[jax.Array], jax.Array]


def estimated(step: Step, on: str) -> dict[str, int]:
    """Returns the bytes that a step takes by `policy.estimate`, in parts.

    Args:
      step: the step; nothing of it has run.
      on: the target.
    """
    [row] = policy.estimate(
        step.function, *step.arguments, policies=[None], on=on, donate=step.donated
    ).rows
    return {
        "arguments": row.arguments,
        "outputs": row.outputs,
        "temporaries": row.temporaries,
        "code": row.code,
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


@functools.cache
def maker(kind: str, shape: tuple[int, ...], dtype: Any) -> Maker:
    """Compiles the program that makes an array from a key, on the device and as nothing else.

    Args:
      kind: "normal", of deviation 0.02, "integers" below 8, "zeros" or "ones".
    """
    if kind == "normal":
        make = lambda key: 0.02 * jax.random.normal(key, shape, dtype)  # noqa: E731
    elif kind == "integers":
        make = lambda key: jax.random.randint(key, shape, 0, 8, dtype)  # noqa: E731
    else:
        make = lambda key: jnp.full(shape, int(kind == "ones"), dtype)  # noqa: E731
    # The key is an argument: XLA would compute a constant's numbers while it compiles.
    return jax.jit(make, keep_unused=True).lower(jax.random.key(0)).compile()


def scalars(step: Step) -> list[Any]:
    """Returns the scalars of a new state of the optimizer, as the loss scale, in their order; None
    of every other leaf.
    """
    params, state = step.arguments[:2]
    is_scalar = [leaf.size == 1 for leaf in jax.tree.leaves(state)]

    @jax.jit
    def made() -> list[Any]:  # XLA drops the other leaves, and what they are made of
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        leaves = jax.tree.leaves(step.init(zeros))
        return [leaf if one else None for leaf, one in zip(leaves, is_scalar, strict=True)]

    return jax.block_until_ready(made())


def makers(step: Step) -> list[Any]:
    """Returns the arguments' trees, with the program that makes it for each leaf.

    The numbers are those that a training may start with, so that no step is skipped: normal
    weights, a state of the optimizer without a past, and integers that are tokens and labels.
    """

    def of(path: Any, leaf: Any) -> Maker:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.copy
        name = jax.tree_util.keystr(path)
        if "'scale'" in name or "'var'" in name:
            kind = "ones"
        elif "'bias'" in name or "'mean'" in name:
            kind = "zeros"
        else:
            kind = "normal" if jnp.issubdtype(leaf.dtype, jnp.floating) else "integers"
        return maker(kind, leaf.shape, leaf.dtype)

    def of_state(leaf: Any, scalar: Any) -> Maker:
        return maker("zeros", leaf.shape, leaf.dtype) if scalar is None else lambda _: scalar

    params, state, *others = step.arguments
    leaves, structure = jax.tree.flatten(state)
    states = [of_state(leaf, scalar) for leaf, scalar in zip(leaves, scalars(step), strict=True)]
    params, others = jax.tree_util.tree_map_with_path(of, (params, others))
    return [params, structure.unflatten(states), *others]


def measured(step: Step, compiled: Any) -> int:
    """Makes the arguments, runs the step once, and returns the growth of the peak, in bytes.

    What is donated is held by nobody else, as in a training loop. The results are held until the
    peak is read.
    """
    device = jax.devices()[0]
    programs, key = makers(step), jax.random.key(0)
    if device.platform == "cpu":
        reset_peak()
        before, peak = resident(), peak_resident
    else:
        before, peak = device.memory_stats()["bytes_in_use"], lambda: _device_peak(device)
    arguments = jax.tree.map(lambda make: make(key), programs)
    jax.block_until_ready(arguments)
    if device.platform == "cpu":
        reset_peak()  # making the arguments takes memory of its own
    results = compiled(*arguments)
    jax.block_until_ready(results)
    return peak() - before


def _device_peak(device: Any) -> int:
    return device.memory_stats()["peak_bytes_in_use"]


def figures(name: str, on: str, small: bool) -> dict[str, Any]:
    """Returns a step's estimate and what it took: bytes, and the device's name."""
    step = STEPS[name](small)
    plan = estimated(step, on)
    compiled = jax.jit(step.function, donate_argnums=step.donated).lower(*step.arguments).compile()
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
    print(json.dumps(figures(options.name, options.on, options.small)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
