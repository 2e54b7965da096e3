"""Times compiled programs beside each other: A B A B, medians, and how far the ratios of neighbors
spread.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

ROUNDS = 7


@dataclasses.dataclass
class Stepper:
    """A compiled `step(carry, *fixed) -> (carry, out)` that is called again and again, its carry
    donated.

    Attributes:
      compiled: the program.
      carry: trees of arrays that each call replaces.
      fixed: the other arguments.
      compile_seconds: wall time to trace, lower and compile.
    """

    compiled: Any
    carry: Any
    fixed: tuple[Any, ...]
    compile_seconds: float

    @classmethod
    def of(cls, step: Callable[..., Any], carry: Any, *fixed: Any) -> Stepper:
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(carry, *fixed).compile()
        return cls(compiled, carry, fixed, time.perf_counter() - start)

    def __call__(self, times: int) -> float:
        """Seconds for that many calls, one after the other; the device is done at the end."""
        start, out = time.perf_counter(), None
        for _ in range(times):
            self.carry, out = self.compiled(self.carry, *self.fixed)
        jax.block_until_ready((self.carry, out))
        return time.perf_counter() - start

    @property
    def planned_bytes(self) -> int:
        """The most memory that XLA plans for a call: arguments, outputs that reuse none of them,
        and temporaries.
        """
        memory = self.compiled.memory_analysis()
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )

    @property
    def kernel(self) -> str:
        return attention_kernel(self.compiled.as_text())


def attention_kernel(program: str) -> str:
    """Which attention a compiled program calls: "cuDNN" where it has calls of cuDNN's fused kernel,
    else "XLA".
    """
    return "cuDNN" if re.search(r'custom_call_target="__cudnn\$fmha', program) else "XLA"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a call: the median over rounds, and each round's."""

    median: float
    rounds: tuple[float, ...]


def spread(of: Timing, beside: Timing) -> float:
    """Half of the range of the ratios of neighbors, beside their median: 0.01 is a percent either
    way.
    """
    ratios = [a / b for a, b in zip(of.rounds, beside.rounds, strict=True)]
    return (max(ratios) - min(ratios)) / 2 / statistics.median(ratios)


def interleaved(
    programs: Mapping[str, Callable[[int], float]], *, sample_seconds: float, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Times each in turn, round after round, so that what the machine does otherwise meets all of
    them.

    Args:
      programs: functions of a number of calls that return how many seconds these took.
      sample_seconds: about how long one program runs in one round.
    """
    times = {}
    for name, program in programs.items():
        program(2)  # the first calls load kernels
        times[name] = max(1, round(sample_seconds / max(program(1), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            found[name].append(program(times[name]) / times[name])
    return {
        name: Timing(statistics.median(seconds), tuple(seconds)) for name, seconds in found.items()
    }
