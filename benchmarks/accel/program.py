"""Compiles a function for a target and measures its program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from policy.inspect.estimate.targets import (
    Target,
    compute_seconds,
    exchange_seconds,
    exchange_time,
    kernel_time,
    overlapped_seconds,
)
from policy.inspect.hlo.costs import Costs, costs_of
from policy.inspect.hlo.dump import compiled_with_dump, with_tables

OutOfMemory = jax.errors.JaxRuntimeError


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one compiled program, on one of the target's devices.

    Attributes:
      cycles: the compiler's estimate, kernels without one at the chip's roofline; 0 of a GPU.
      bytes: moved by kernels, of the TPU's compiler its own count where no loop runs.
      moved: the same by the shapes in the program's text, whatever runs; memory of the chip's own
        is free.
      has_loops: whether a loop runs, which the compiler's own count takes once.
      temporary: bytes of temporary memory at their peak.
      arguments: bytes of the arguments.
      results: bytes of the results that overwrite no donated argument.
      kernels: how many run.
      flops: the compiler's count; 0 of a GPU.
      collectives: bytes of one device's results, by operation and dtype.
      exchange: seconds of the collectives at the published bandwidth of the links; 0 where none is
        published.
      uncounted: costs that the figures leave out.
      rooflines: kernels with a hundredth of the cycles and more whose cycles are the chip's
        roofline.
      seconds: CPU seconds of the compiler.
      compute_seconds: of the kernels on the chip, by cycles or the roofline of its published
        figures; None where it has neither.
      overlapped_seconds: of kernels and exchanges, where these run beside the kernels that the
        program's schedule has between their start and their end.
    """

    cycles: float
    bytes: float
    moved: float
    has_loops: bool
    temporary: float
    arguments: float
    kernels: int
    flops: float
    collectives: dict[tuple[str, str], float]
    exchange: float
    uncounted: tuple[str, ...]
    rooflines: tuple[str, ...]
    seconds: float
    costs: Costs = dataclasses.field(repr=False, default_factory=Costs)
    results: float = 0.0
    compute_seconds: float | None = None
    overlapped_seconds: float | None = None

    @property
    def memory(self) -> float:
        """The bytes of a chip's memory that a run takes."""
        return self.arguments + self.temporary + self.results


def placed(target: Target, tree: Any) -> Any:
    """Places shapes on the target's first device; keys stay keys."""
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def measure(
    target: Target,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donated: Sequence[int] = (),
    **options: Any,
) -> Figures:
    """Compiles `function` for shapes on the target's devices, without running it, and returns its
    figures.

    Args:
      arguments: trees of `jax.ShapeDtypeStruct` with shardings, as `placed` makes them.
      donated: positions of arguments that may be overwritten.
      **options: of `jax.jit`.

    Raises:
      OutOfMemory: the program needs more memory than the chip has; the message has the figure.
    """
    jitted = jax.jit(function, donate_argnums=tuple(donated), **options)
    return of_lowered(
        target, jitted.trace(*arguments).lower(lowering_platforms=(target.chip.platform,))
    )


def of_lowered(target: Target, lowered: Any) -> Figures:
    """Compiles the result of `jax.jit(...).lower(...)` and returns its figures."""
    start = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - start
    text = compiled.as_text()
    if "%splash_" in text:  # its masks' tables are in a dump alone, which no cache has
        text = with_tables(text, compiled_with_dump(lowered)[1])
    chip = target.chip
    is_tpu = chip.platform == "tpu"
    costs = costs_of(text, kernel_time(chip), exchange_time(chip))
    analysis = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    loops = " while(" in text
    return Figures(
        cycles=costs.time if is_tpu else 0.0,
        compute_seconds=compute_seconds(chip, costs),
        overlapped_seconds=overlapped_seconds(chip, costs),
        bytes=costs.bytes if loops or not is_tpu else analysis["bytes accessed"],
        moved=costs.bytes,
        has_loops=loops,
        temporary=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        kernels=costs.kernels,
        flops=analysis.get("flops", 0.0),
        collectives=costs.collectives,
        exchange=exchange_seconds(chip, costs.collectives) or 0.0,
        uncounted=tuple(costs.uncounted),
        rooflines=tuple(
            name for name, cycles in costs.rooflines.items() if cycles > 0.01 * costs.time
        ),
        seconds=seconds,
        costs=costs,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )


def half(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16)
