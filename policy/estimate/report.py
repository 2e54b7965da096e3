"""The result of an estimate: the costs of a program under each policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in a device's memory at the moment when the most of it is taken.

    Attributes:
      bytes: its size on one device.
      dtype: its dtype, as in "bfloat16".
      shape: on one device.
      kind: "argument", "output" or "temporary".
      path: the module path of the operation that makes it, or of an argument its name, as in
        ``args[0]['params']['kernel']``; "" if there is none.
      operation: the JAX operation that makes it, as in "dot_general"; "" of an argument.
      source: the line of the user's code, as "model.py:12 (Net.__call__)"; "" if it is unknown.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    path: str
    operation: str
    source: str


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges of one kind and dtype.

    Attributes:
      operation: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or
        "ragged-all-to-all".
      dtype: the dtype that is exchanged.
      bytes: of the results on one device, of a reduce-scatter of its operands.
      seconds: the least that they take at the published bandwidth of the links; None where none is
        published.
    """

    operation: str
    dtype: str
    bytes: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class PolicyCost:
    """The costs of one step under one policy, on one of the target's devices unless said otherwise.

    Attributes:
      name: the row's name.
      policy: the policy's short form.
      route: how the policy is applied: "scope" by layers that obey it, "autocast", or "as written".
      memory: bytes that a step takes: arguments, temporaries, outputs that overwrite no argument,
        and the program itself.
      capacity: bytes that the device has; 0 if unknown.
      arguments, temporaries, outputs, code: bytes of the parts of `memory`.
      flops: floating-point operations of all devices together, by the widest dtype of the operands,
        the largest first.
      matmul_flops: those of matmuls and convolutions.
      bytes: read from and written to the device's memory by kernels; None if the program didn't
        compile.
      cycles: the compiler's estimate; None where it gives none.
      compute_seconds: the time of the kernels, exchanges left out; None where neither cycles nor
        published peaks are known.
      collectives: exchanges between devices.
      kernels: how many kernels run; None if the program didn't compile.
      uncounted: costs that the figures leave out.
      buffers: the largest arrays when the most memory is taken, the largest first.
      compile_seconds: CPU seconds of the compiler.
      cost_by_path: cycles, or seconds where there are none, of each module path.
      is_exhausted: whether the compiler ran out of memory.
    """

    name: str
    policy: str
    route: str
    memory: int
    capacity: int
    arguments: int
    temporaries: int
    outputs: int
    code: int
    flops: Mapping[str, float]
    matmul_flops: Mapping[str, float]
    bytes: float | None
    cycles: float | None
    compute_seconds: float | None
    collectives: tuple[Exchange, ...]
    kernels: int | None
    uncounted: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    compile_seconds: float
    cost_by_path: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_exhausted: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the device's memory; None if that is unknown."""
        if self.is_exhausted:
            return False
        return self.memory <= self.capacity if self.capacity else None

    @property
    def spare(self) -> int:
        """Bytes of the device's memory that are left; negative are those that are missing."""
        return self.capacity - self.memory

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of the exchanges; None if any of them is unknown."""
        seconds = [one.seconds for one in self.collectives]
        return (
            None
            if any(one is None for one in seconds)
            else float(sum(one or 0.0 for one in seconds))
        )

    @property
    def seconds(self) -> float | None:
        """Seconds of the kernels, and of the exchanges after them where those are known."""
        if self.compute_seconds is None:
            return None
        return self.compute_seconds + (self.exchange_seconds or 0.0)

    @property
    def is_lower_bound(self) -> bool:
        """Whether `seconds` leaves something out: exchanges, or kernels without an estimate."""
        return self.exchange_seconds is None or bool(self.uncounted)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step costs under each policy on a target; returned by `policy.estimate`.

    Attributes:
      name: of the function.
      target: the target's name.
      devices: how many it has.
      mesh: the axes of the mesh and their sizes.
      capacity: bytes of a device's memory; 0 if unknown.
      clock: Hz by which cycles become seconds; 0 where there are none.
      timing: where seconds come from: "the compiler's cycles", "a roofline of published peaks", or
        "" if there are none.
      source: the document of the device's figures.
      compiler: its name and version.
      rows: the costs, in the order of the policies.
      notes: remarks on the whole, as that nothing is sharded.
    """

    name: str
    target: str
    devices: int
    mesh: Mapping[str, int]
    capacity: int
    clock: float
    timing: str
    source: str
    compiler: str
    rows: tuple[PolicyCost, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PolicyCost:
        """Returns a row by its name.

        Raises:
          KeyError: there is no such row; the message names those that there are.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(
            f"There is no row {name!r}. Rows: {', '.join(row.name for row in self.rows)}."
        )

    def to_json(self, *, indent: int | None = 1) -> str:
        raise NotImplementedError

    def to_html(self) -> str:
        raise NotImplementedError

    def plot(self, path: str | Path | None = None) -> Any:
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        raise NotImplementedError

    def show(self, file: TextIO | None = None) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError
